# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay: on engines made of an acceptance and a cost, and on a real one with an untrained exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import drafter_of
from exactness import CASES, generate, greedy, prompts
from vllm import SamplingParams

from vllm_ppd.vllm_plugins.adaptive.draft_acceptance import DraftAcceptance
from vllm_ppd.vllm_plugins.adaptive.drafts import LONG_PAUSE, MOST_PATIENCE, PROBE_EVERY, AdaptiveDrafts
from vllm_ppd.vllm_plugins.metrics import COUNTERS

Cost = Callable[[int, int], float]
MOST = 4


class Simulation:
    """Requests whose drafts are accepted with given probabilities, in steps of given seconds, with noise.

    With heads that take `extra` seconds of every step but those in which they rest, a request drafts no more once they
    did, and others come after `life` steps. The first step with drafts after one without takes `cold` seconds more, and
    so do the first `lingers` without. Before drafts after a pause they catch up, which takes `catching_up` seconds.
    """

    def __init__(
        self,
        cost: Cost,
        requests: int = 1,
        noise: float = 0.1,
        seed: int = 0,
        extra: float = 0.0,
        life: int = 1 << 40,
        cold: float = 0.0,
        lingers: int = 1,
        sleeps: bool = True,
        catching_up: float = 0.0,
    ) -> None:
        self.catching_up = catching_up
        self.cold, self.lingers, self.drafted, self.alike = cold, lingers, False, 0
        self.sleeps, self.slept = sleeps, 0
        self.kind = 0  # of all requests' drafts
        self.nap = self.napped = 0  # steps of the nap, and those that are over
        self.names: list[str] = []
        self.cost, self.requests, self.noise, self.extra, self.life = cost, requests, noise, extra, life
        self.steps, self.holes, self.rested = 0, False, 0
        self.rng, self.clocks = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self.adaptive = AdaptiveDrafts(MOST)
        self.drafts = np.zeros(requests, dtype=np.int64)
        self.now, self.tokens, self.seconds = 0.0, 0, 0.0
        self.chosen: list[list[int]] = []
        self.fixed = np.zeros(requests, dtype=bool)

    def run(self, steps: int, acceptance: float | list[float]) -> list[int]:
        """Run some steps; returns the most drafts of each."""
        rates = np.broadcast_to(np.asarray(acceptance, dtype=float), self.requests)
        kinds, most = np.full(self.requests, self.kind), []
        for _ in range(steps):
            resting = bool(self.extra) and self.adaptive.resting
            self.steps, self.rested = self.steps + 1, self.rested + resting
            lasting = bool(self.extra) and self.adaptive.lasting  # what is missed then is not made up for
            self.holes = (self.holes or lasting) and self.steps % self.life != 0
            names = [f"r{i} of {self.steps // self.life}" for i in range(self.requests)]
            took = self.cost(self.requests, int(self.drafts.max())) + self.extra * (not resting)
            self.alike = self.alike + 1 if bool(self.drafts.any()) == self.drafted else 0
            self.drafted = bool(self.drafts.any())
            took += self.cold * (self.alike < (1 if self.drafted else self.lingers))
            self.now += took * float(np.exp(self.noise * self.clocks.standard_normal()))
            right = self.rng.random((self.requests, MOST)) < rates[:, None]
            accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), self.drafts)
            self.tokens, self.seconds = self.tokens + int((1 + accepted).sum()), self.seconds + took
            own = 1.0 if resting else 1 / (1 + self.extra)
            if names != self.names and self.nap:
                if self.napped:
                    self.adaptive.slept(self.napped, None)
                self.nap = self.napped = 0
            if self.nap:
                self.napped += 1
                if self.napped == self.nap:
                    self.adaptive.slept(self.nap, self.now, own)
                    self.slept, self.nap, self.napped = self.slept + self.nap, 0, 0
            elif self.sleeps and names == self.names and self.adaptive.sleeps_on(self.now, own):
                self.slept += 1
            else:
                self.adaptive.observe(names, 1 + accepted, self.now, True, own)
                allowed = np.full(self.requests, 0 if self.holes else MOST)
                self.drafts = self.adaptive.choose(allowed, self.requests, kinds, self.fixed)
                if self.catching_up and self.drafts.any() and not self.drafted:
                    self.now, self.seconds = self.now + self.catching_up, self.seconds + self.catching_up
                    self.adaptive.interrupted(self.catching_up)
            if self.sleeps and not self.nap and not self.drafts.any():
                self.nap = self.adaptive.nap()
            self.names = names
            most.append(int(self.drafts.max()))
            self.chosen.append(self.drafts.tolist())
        return most

    def speed(self, steps: int, acceptance: float | list[float]) -> float:
        """Tokens a second over some steps, in units of those without drafts."""
        tokens, seconds = self.tokens, self.seconds
        self.run(steps, acceptance)
        plain = self.requests / self.cost(self.requests, 0)
        return (self.tokens - tokens) / (self.seconds - seconds) / plain


@pytest.mark.parametrize(("acceptance", "share"), [(0.02, 0.25), (0.2, 0.5), (0.0, 0.02), (0.3, 0.9)])
@pytest.mark.parametrize("requests", [1, 8])
def test_pauses_that_are_slept_through_end_as_others(acceptance: float, share: float, requests: int) -> None:
    """What a runner calls in a pause, or leaves out, in place of observe and choose does not change who drafts when.

    But for some steps at the end of drafting, where the prices told by a nap's mean tip the scale.
    """
    asleep, awake = (
        Simulation(shallow(share), requests, noise=0.0, extra=0.1, life=700, sleeps=sleeps) for sleeps in (True, False)
    )
    for rate in (acceptance, 0.9, acceptance):
        asleep.run(2000, rate)
        awake.run(2000, rate)
    differ = (np.array(asleep.chosen) > 0) != (np.array(awake.chosen) > 0)
    assert differ.any(axis=1).sum() <= 12  # of 6000
    assert abs(asleep.rested - awake.rested) <= 12
    assert asleep.seconds == pytest.approx(awake.seconds, rel=0.01)
    assert asleep.slept > 100 and awake.slept == 0


def shallow(share: float) -> Cost:
    """Drafts that cost a share of a step each, whatever the batch."""
    return lambda requests, drafts: 1 + share * drafts


def predicted(acceptance: float, share: float) -> list[float]:
    """Speed-up of 0, 1, ... drafts a step."""
    return [sum(acceptance**i for i in range(n + 1)) / (1 + share * n) for n in range(MOST + 1)]


@pytest.mark.parametrize(("acceptance", "share"), [(0.9, 0.1), (0.6, 0.25), (0.5, 0.05), (0.3, 0.1), (0.95, 0.5)])
@pytest.mark.parametrize("requests", [1, 8])
def test_converges_to_the_number_that_pays(acceptance: float, share: float, requests: int) -> None:
    engine = Simulation(shallow(share), requests)
    engine.run(500, acceptance)
    best = max(predicted(acceptance, share))
    assert engine.speed(3000, acceptance) > 0.95 * best


@pytest.mark.parametrize(("acceptance", "share"), [(0.02, 0.25), (0.2, 0.5), (0.3, 0.9), (0.6, 1.5), (0.0, 0.02)])
@pytest.mark.parametrize("requests", [1, 8])
def test_stops_where_no_number_pays_and_costs_next_to_nothing(acceptance: float, share: float, requests: int) -> None:
    engine = Simulation(shallow(share), requests)
    assert engine.speed(3000, acceptance) > 0.97  # from the first step on
    if share > 0.1:  # cheaper drafts than the clock can tell may be made
        assert engine.speed(3000, acceptance) > 0.985
        assert share * np.mean(np.array(engine.run(9000, acceptance)) > 0) < 0.012


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_probes_take_a_fixed_part_of_a_pause_and_less_of_one_that_goes_on(share: float) -> None:
    engine = Simulation(shallow(share))
    early = np.array(engine.run(600, 0.0)[100:])
    assert 0.002 < np.mean(early > 0) * share < 0.02
    engine.run(12_000, 0.0)
    drafting = np.flatnonzero(engine.run(40 * PROBE_EVERY, 0.0))
    assert 6 <= len(drafting) * share <= 14  # a quarter of 40
    gaps = np.diff(drafting)
    assert np.median(gaps[gaps > 1]) >= 0.7 * MOST_PATIENCE * share * PROBE_EVERY


def test_a_pause_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes a tenth of a small step: but for trials there is one in LONG_PAUSE steps, and one in PROBE_EVERY."""
    engine, looked = Simulation(shallow(0.5)), []
    engine.run(8000, 0.0)
    choose = engine.adaptive.choose
    monkeypatch.setattr(engine.adaptive, "choose", lambda *args: looked.append(engine.steps) or choose(*args))
    drafted = np.flatnonzero(engine.run(4096, 0.0)) + engine.steps - 4095
    apart = [step for step in looked if (np.abs(drafted - step) > 1).all()]
    assert 0 < len(apart) <= 4096 / LONG_PAUSE + 4096 / PROBE_EVERY


@pytest.mark.parametrize("requests", [1, 4])
def test_trials_lose_no_more_than_their_share_whatever_they_are_lost_by(requests: int) -> None:
    """Heads that have to catch up before each trial, and drafts that pay at times but not on the whole."""
    engine = Simulation(lambda requests, drafts: 1 + 0.5 * (drafts > 0), requests, catching_up=2.0)
    engine.run(500, 0.25)
    assert engine.speed(20_000, 0.25) > 0.99
    assert np.count_nonzero(np.diff(np.flatnonzero(engine.run(20_000, 0.25))) > 1) > 20


def test_probes_that_pay_now_and_then_keep_coming() -> None:
    """One text in four can be drafted: it is found as soon as it would be after a short pause."""
    engine = Simulation(shallow(0.25))
    for _ in range(40):
        engine.run(400, 0.0)
        engine.run(133, 0.9)
    engine.run(400, 0.0)
    tokens = engine.tokens
    engine.run(200, 0.9)
    assert engine.tokens - tokens > 1.5 * 200


def test_probes_in_vain_of_one_kind_of_requests_say_nothing_of_others() -> None:
    """As of sampling requests, when greedy ones come."""
    drafted = []
    for steps in (200, 8000):
        engine = Simulation(shallow(0.25), life=100)
        engine.run(steps, 0.0)
        engine.kind = 1
        drafted.append(np.mean(np.array(engine.run(300, 0.9)) > 0))
    assert min(drafted) > 0.6


def test_requests_whose_prompts_are_taken_in_bit_by_bit_are_asked_once_they_are_whole() -> None:
    engine = Simulation(shallow(0.25))
    engine.run(400, 0.1)
    adaptive, kinds, free = engine.adaptive, np.array([1]), np.zeros(1, dtype=bool)
    for _ in range(3):
        adaptive.observe(["new"], np.array([0]), engine.now, False)
        assert not adaptive.choose(np.array([0]), 0, kinds, free).any()
    adaptive.observe(["new"], np.array([1]), engine.now, False)
    assert adaptive.choose(np.array([MOST]), 1, kinds, free).any()


def test_first_guess_of_a_kind_that_nobody_tried_does_not_fade() -> None:
    """A draft or two that were rejected would be all that is known of it."""
    acceptance = DraftAcceptance(2)
    acceptance.align(["a"])
    before = acceptance.probabilities()
    for step in range(1, 60):
        acceptance.fade_idle(step)
    np.testing.assert_array_equal(acceptance.probabilities(), before)
    acceptance.learn(np.array([2]), np.array([0]), 60)
    assert acceptance.probabilities()[0, 0] > 0.4
    once = acceptance.probabilities()
    acceptance.fade_idle(61)
    assert (acceptance.probabilities() != once).any()


def test_cheap_drafts_find_out_soon_that_the_text_has_changed() -> None:
    for seed in range(5):
        engine = Simulation(shallow(0.06), seed=seed)
        engine.run(1000, 0.0)
        assert (np.array(engine.run(2 * PROBE_EVERY, 0.6))[-32:] > 0).mean() > 0.5


def test_dear_probes_are_fewer() -> None:
    engine = Simulation(shallow(4.0))
    engine.run(2000, 0.0)
    assert np.mean(np.array(engine.run(40 * PROBE_EVERY, 0.0)) > 0) * 4 < 0.01


@pytest.mark.parametrize("requests", [1, 4])
def test_comes_back_when_the_text_changes(requests: int) -> None:
    for seed in range(5):
        engine = Simulation(shallow(0.25), requests, seed=seed)
        engine.run(2000, 0.02)
        back = np.array(engine.run(10 * PROBE_EVERY, 0.9))
        assert (back[-PROBE_EVERY:] > 1).mean() > 0.9
        assert engine.speed(1000, 0.9) > 0.9 * max(predicted(0.9, 0.25))


@pytest.mark.parametrize("requests", [1, 8])
def test_heads_that_run_in_every_step_rest_in_pauses(requests: int) -> None:
    """A pause costs nothing then, and requests that come later draft again."""
    for seed in range(5):
        engine = Simulation(shallow(0.1), requests, seed=seed, extra=0.15, life=100)
        assert engine.speed(3000, 0.02) > 0.97
        rested = engine.rested
        assert engine.speed(3000, 0.02) > 0.98
        assert engine.rested - rested > 2600
        engine.run(1000, 0.9)
        rested = engine.rested
        assert engine.speed(1000, 0.9) > 0.9 * max(predicted(0.9, 0.1)) / 1.15
        assert engine.rested - rested < 50


def test_comes_back_when_the_load_changes() -> None:
    """Drafts that cost nothing in a small batch and a step each in a large one."""
    engine = Simulation(lambda requests, drafts: 1 + drafts * (0.1 if requests < 8 else 1.5))
    for requests, pays in ((2, True), (16, False), (2, True), (16, False)):
        engine.requests, engine.drafts = requests, np.zeros(requests, dtype=np.int64)
        engine.fixed = np.zeros(requests, dtype=bool)
        engine.run(200, 0.7)
        assert bool(np.mean(engine.run(500, 0.7)) > 2) is pays
        if not pays:
            assert engine.speed(1000, 0.7) > 0.97


def test_steps_that_find_nothing_in_the_caches_do_not_keep_a_pause_going() -> None:
    speeds = []
    for seed in range(8):
        engine = Simulation(shallow(0.2), seed=seed, cold=1.0)
        engine.run(1000, 0.02)
        engine.run(10 * PROBE_EVERY, 0.5)
        speeds.append(engine.speed(1000, 0.5) / max(predicted(0.5, 0.2)))
    assert np.mean(speeds) > 0.965 and min(speeds) > 0.9  # what is accepted in one run is not known to a few per cent


@pytest.mark.parametrize("requests", [1, 8])
def test_steps_without_drafts_that_need_time_to_settle_do_not_keep_drafting_going(requests: int) -> None:
    """Timed one by one between drafts they would all take 1.2, and drafts that lose 6 % would seem to win."""
    engine = Simulation(shallow(0.33), requests, noise=0.05, cold=0.2, lingers=3)
    engine.run(3000, 0.9)
    engine.run(600, 0.25)
    assert engine.speed(4000, 0.25) > 0.98


def test_costs_that_change_are_seen() -> None:
    engine = Simulation(shallow(0.1))
    assert np.mean(engine.run(1000, 0.6)[-500:]) > 1
    engine.cost = shallow(2.0)
    engine.run(500, 0.6)
    assert engine.speed(2000, 0.6) > 0.96
    engine.cost = shallow(0.1)
    engine.run(30 * PROBE_EVERY, 0.6)
    assert np.mean(np.array(engine.run(1000, 0.6)) > 0) > 0.9


def test_drafts_that_hardly_pay_are_soon_found_not_to() -> None:
    """Only steps without drafts show that these have become cheaper; of them there are more where little is lost."""
    began, without = shallow(0.3), []
    for seed in range(8):
        engine = Simulation(began, noise=0.02, seed=seed)
        while engine.run(200, 0.42).count(0) > 24:  # drafts are 1.09 times as fast as none
            assert engine.steps < 20_000
        engine.cost = lambda requests, drafts: began(requests, drafts) * (1.0 if drafts else 0.8)
        engine.run(100, 0.42)
        without.append(engine.run(100, 0.42).count(0))
    assert np.mean(without) > 75


@pytest.mark.parametrize("requests", [1, 4])
def test_a_machine_that_is_slow_for_moments_does_not_make_drafting_pay(requests: int) -> None:
    """Steps without drafts that were timed in such a moment would make those with drafts look cheap."""
    for seed in range(3):
        rng, factors, begins = np.random.default_rng(100 + seed), np.ones(4100), 0
        while (begins := begins + int(rng.integers(30, 200))) < 4000:
            ends = begins + int(rng.integers(5, 60))
            factors[begins:ends], begins = rng.uniform(1.2, 1.8), ends
        counted: list[float] = []

        def cost(requests: int, drafts: int, factors: np.ndarray = factors, counted: list[float] = counted) -> float:
            counted.append(shallow(0.5)(requests, drafts))
            return counted[-1] * float(factors[len(counted)])

        engine = Simulation(cost, requests, seed=seed, noise=0.05, cold=0.05, lingers=2)
        engine.run(4000, 0.4)
        assert engine.tokens / requests / sum(counted) * shallow(0.5)(requests, 0) > 0.985


@pytest.mark.parametrize("requests", [1, 8])
def test_a_slow_start_does_not_make_drafting_pay_for_long(requests: int) -> None:
    """Few steps without drafts were timed, all of them while the machine was slow: they are soon timed again."""
    for seed in range(3):
        counted: list[int] = []

        def cost(requests: int, drafts: int, counted: list[int] = counted) -> float:
            counted.append(drafts)
            return shallow(0.5)(requests, drafts) * (1.5 if len(counted) <= 6 else 1.0)

        engine = Simulation(cost, requests, seed=seed, noise=0.02)
        most = engine.run(160, 0.35)
        assert np.mean(np.array(most[60:]) > 0) < 0.2


def test_requests_of_one_batch_differ() -> None:
    rates = [0.9] * 4 + [0.02] * 4
    engine = Simulation(shallow(0.2), 8)
    engine.run(500, rates)
    start = len(engine.chosen)
    engine.run(1000, rates)
    mean = np.mean(engine.chosen[start:], axis=0)
    assert mean[:4].min() > 2
    assert mean[4:].max() < 0.6


def test_same_steps_and_times_give_the_same_choices() -> None:
    runs = [Simulation(shallow(0.3), 4, seed=3) for _ in range(2)]
    for engine in runs:
        engine.run(1500, 0.5)
    assert runs[0].chosen == runs[1].chosen


def test_ranks_choose_alike_by_the_first_ranks_clock() -> None:
    """Clocks that tell opposite stories; the second rank takes over what the first has measured."""
    first, second = Simulation(shallow(0.05), 2), Simulation(shallow(3.0), 2)
    told: list[np.ndarray] = []
    first.adaptive.costs.agree = lambda numbers: told.append(numbers.copy()) or numbers.copy()  # type: ignore[func-returns-value]
    second.adaptive.costs.agree = lambda numbers: told[-1]
    for _ in range(800):
        first.run(1, 0.6)
        second.run(1, 0.6)
    assert first.chosen == second.chosen
    assert np.mean(first.chosen[-200:]) > 1


def test_seeded_requests_always_draft() -> None:
    engine = Simulation(shallow(1.0), 2)
    engine.fixed = np.array([True, False])
    engine.run(500, 0.0)
    assert {drafts[0] for drafts in engine.chosen} == {MOST}


def test_what_is_known_of_a_request_follows_it() -> None:
    adaptive = AdaptiveDrafts(2)
    sampled, free = np.zeros(3, dtype=bool), np.zeros(3, dtype=bool)
    for _ in range(40):
        adaptive.observe(["a", "b", "c"], np.array([3, 1, 2]), 0.0, False)
        adaptive._drafts = np.array([2, 2, 2])
    adaptive.observe(["c", "new", "a"], np.array([1, 1, 1]), 0.0, False)
    rates = adaptive.acceptance.hits[:, 0] / np.maximum(adaptive.acceptance.trials[:, 0], 1e-9)
    assert rates[0] > 0.9 and rates[1] == 0 and rates[2] > 0.9
    assert adaptive.acceptance.trials[1].sum() == 0
    assert len(adaptive.choose(np.array([2, 2, 2]), 3, sampled, free)) == 3


# ---- a real engine

ADAPTIVE = {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 3, "adaptive": True}


@pytest.mark.engine
@pytest.mark.parametrize("case", ["batch_16", "more_than_fit", "arrivals_and_aborts", "structured_output"])
def test_same_tokens(engine: Callable[..., Any], case: str) -> None:
    expected = CASES[case](engine())
    assert CASES[case](engine(ADAPTIVE)) == expected


@pytest.mark.engine
def test_drafts_that_cost_a_step_die_down(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are accepted, a draft that takes a step's time never pays: hardly any are made, and that is counted.

    The seconds are set here, as those of a tiny model say more of what else the machine does.
    """
    llm = engine(ADAPTIVE)
    counters, costs = drafter_of(llm).counters, drafter_of(llm).planner.adaptive.costs
    add = costs.add
    monkeypatch.setattr(costs, "add", lambda size, drafts, _, steps=1: add(size, drafts, 1.0 + drafts, steps))
    params = SamplingParams(temperature=1.0, max_tokens=230, ignore_eos=True)
    for _ in range(2):  # what other tests left the engine with is unlearned by then
        generate(llm, prompts(2, 20), params)
    before, values = llm.counts.copy(), counters.values.copy()
    tokens = sum(len(output) for _ in range(3) for output in generate(llm, prompts(2, 20), params))
    drafted = (llm.counts - before)["drafted"]
    withheld = (counters.values - values)[list(COUNTERS).index("withheld_drafts")]
    assert tokens == 3 * 2 * 230
    assert drafted < 0.1 * tokens
    # Nearly each token was a step of its own, for which 3 drafts were allowed but at the very end.
    assert withheld > 2.5 * tokens


@pytest.mark.engine
def test_seeded_requests_repeat(engine: Callable[..., Any]) -> None:
    llm = engine(ADAPTIVE)
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=7)
    first = generate(llm, prompts(3, 30), params)
    generate(llm, prompts(2, 20), greedy())
    assert generate(llm, prompts(3, 30), params) == first
