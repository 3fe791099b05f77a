# SPDX-License-Identifier: Apache-2.0
"""None or all drafts, in a deterministic simulation: steps are scheduled ahead of what
they verify.
"""

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts
from vllm_ppd.vllm_plugins.draft_length.repeated_text import RepeatedText
from vllm_ppd.vllm_plugins.draft_length.scheduled import CYCLE, ScheduledDrafts

DRAFTS = 3


class Engine:
    """Requests whose drafts are accepted with a given probability.

    Args:
        share: of a step without drafts that drafts and their verification cost.
        requests: in every step.
        ahead: steps that are scheduled before the output of one is known: 1,
            asynchronously 2.
        error: of the measured cost of a step with drafts, as a factor.
    """

    def __init__(
        self, share: float, requests: int, ahead: int, seed: int = 0, error: float = 1.0
    ) -> None:
        self.share = share
        self.requests = requests
        self.ahead = ahead
        self.lookup = ScheduledDrafts(DRAFTS, None, 64)
        seconds = [[1.0, error * (1.0 + share)]] * 2
        self.lookup.follow(
            StepCosts(CostTable(sizes=[1, 64], counts=[0, DRAFTS], seconds=seconds))
        )
        self.rng = np.random.default_rng(seed)
        self.made = 0
        self.waiting = list[tuple[int, np.ndarray]]()
        self.verified: list[int] = []  # drafts of each step
        self.may_draft = [True] * requests
        # Steps after which other requests come
        self.life = 1 << 40
        self.greedy = True

    def run(self, steps: int, acceptance: float) -> float:
        """Run some steps; returns tokens per cost in units of those without drafts."""
        tokens = seconds = 0.0
        for _ in range(steps):
            drafts = self.made
            self.made = self.lookup[self.requests]
            right = np.cumprod(
                self.rng.random((self.requests, DRAFTS)) < acceptance, axis=1
            ).sum(axis=1)
            emitted = 1 + np.minimum(right, drafts) * self.may_draft
            self.waiting.append((drafts, emitted))
            self.verified.append(drafts)
            tokens += emitted.sum()
            # What is drafted costs half, and what is verified.
            seconds += 1 + self.share * (self.made + drafts) / (2 * DRAFTS)
            if len(self.waiting) >= self.ahead:
                drafts, emitted = self.waiting.pop(0)
                names = [
                    f"{i} of {len(self.verified) // self.life}"
                    for i in range(self.requests)
                ]
                drafted = [drafts * may for may in self.may_draft]
                greedy = [self.greedy] * self.requests
                self.lookup.observe(
                    names, drafted, emitted.tolist(), greedy, self.may_draft
                )
        return float(tokens / seconds / self.requests)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_never_pays(share: float, requests: int, ahead: int) -> None:
    engine = Engine(share, requests, ahead)
    engine.run(64, 0.01)
    assert engine.run(3000, 0.01) > 0.99
    assert np.mean([drafts > 0 for drafts in engine.verified[64:]]) < 0.03


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(("share", "acceptance"), [(0.1, 0.4), (0.25, 0.6), (0.5, 0.9)])
def test_pays(share: float, acceptance: float, ahead: int) -> None:
    fixed = sum(acceptance**i for i in range(DRAFTS + 1)) / (1 + share)
    engine = Engine(share, 4, ahead)
    engine.run(64, acceptance)
    assert engine.run(3000, acceptance) > 0.98 * fixed


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("requests", [1, 8])
def test_comes_back_within_64_steps(requests: int, ahead: int) -> None:
    late = []
    for seed in range(8):
        engine = Engine(0.2, requests, ahead, seed)
        engine.run(400, 0.01)
        before = len(engine.verified)
        engine.run(400, 0.8)
        off = [drafts == 0 for drafts in engine.verified[before:]]
        late.append(off.index(False))
        assert np.mean(off[late[-1] + 64 :]) < 0.2
    assert max(late) <= 64, late


@pytest.mark.parametrize(
    ("bad", "good", "floor"), [(400, 133, 1.05), (1000, 1000, 1.38)]
)
def test_text_that_changes_often(bad: int, good: int, floor: float) -> None:
    engine = Engine(0.25, 4, 2)
    engine.run(500, 0.9)
    speeds = [(engine.run(bad, 0.02), engine.run(good, 0.9)) for _ in range(5)]
    assert (bad + good) / np.mean(
        [bad / slow + good / fast for slow, fast in speeds]
    ) > floor


@pytest.mark.parametrize("error", [0.92, 1.08])
def test_costs_that_were_measured_inexactly(error: float) -> None:
    """Steps with drafts are measured 8 % too fast or too slow: no more than that is lost by it."""
    engine = Engine(0.2, 4, 2, error=error)
    engine.run(500, 0.8)
    assert engine.run(3000, 0.8) > 0.92 * sum(0.8**i for i in range(DRAFTS + 1)) / 1.2
    engine.run(500, 0.05)
    assert engine.run(3000, 0.05) > 0.92


def test_explorations_become_rarer_until_they_take_a_share_of_the_time() -> None:
    engine = Engine(1.0, 1, 1)
    engine.run(6000, 0.0)
    gaps = np.diff(np.flatnonzero(engine.verified[64:]))
    assert (
        (np.diff(gaps) >= 0).all()
        and gaps[0] < gaps[-1]
        and set(gaps[-3:].tolist()) == {CYCLE * 42}
    )


def test_explorations_of_a_kind_of_requests_say_nothing_of_others() -> None:
    """As of greedy requests, when sampling ones come."""
    engine = Engine(0.25, 4, 2)
    engine.life = 100
    engine.run(2000, 0.0)
    engine.greedy = False
    before = len(engine.verified)
    engine.run(300, 0.9)
    assert np.mean(np.array(engine.verified[before:]) > 0) > 0.9


def test_the_same_steps_give_the_same_choices() -> None:
    first, second = (Engine(0.3, 4, 2, seed=3) for _ in range(2))
    for acceptance in (0.1, 0.7, 0.3):
        assert first.run(300, acceptance) == second.run(300, acceptance)
    assert first.verified == second.verified


def test_large_batches_do_not_draft() -> None:
    lookup = ScheduledDrafts(DRAFTS, 8, 64)
    assert [lookup[n] for n in (1, 8, 9, 64)] == [DRAFTS, DRAFTS, 0, 0]
    assert (
        lookup.take_counts() == {"drafting_off_steps/batch_size": 2}
        and lookup.take_counts() == {}
    )


@pytest.mark.parametrize("drafting", [0, 1])
def test_requests_that_opted_out_have_their_share_of_the_cost(drafting: int) -> None:
    """Drafts of one request of eight do not pay for a step in which all have drafts;
    without one, none are made.
    """
    engine = Engine(0.5, 8, 2)
    engine.may_draft = [True] * drafting + [False] * (8 - drafting)
    engine.run(64, 0.9)
    assert (
        engine.run(1000, 0.9) > 0.97
        and np.mean(np.array(engine.verified[64:]) > 0) <= 0.04 * drafting
    )


@pytest.mark.parametrize("ahead", [1, 2])
def test_lookups_alone_draft_where_a_text_repeats_itself(ahead: int) -> None:
    """No exploration where no request has a match, and drafts within a choice of the
    first that has.
    """
    engine = Engine(0.1, 2, ahead)
    engine.lookup.texts = RepeatedText(2)
    engine.lookup.lookups_alone = True
    for text, drafting in (
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 1, 2], 1.0),
        ([1, 2, 3, 1, 2, 9], 0.0),
    ):
        engine.lookup.texts.extend("0 of 0", text)
        engine.run(CYCLE + ahead, 0.9)
        before = len(engine.verified)
        engine.run(200, 0.9)
        assert np.mean([drafts > 0 for drafts in engine.verified[before:]]) == drafting
    counts = engine.lookup.take_counts()
    assert (
        counts["drafting_off_steps/no_match"] > 380
        and "drafting_off_steps/cost" not in counts
    )
