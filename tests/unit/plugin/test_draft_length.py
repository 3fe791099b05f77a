# SPDX-License-Identifier: Apache-2.0
"""The number of drafts that pays, in a deterministic simulation: acceptance and costs are given, no clock is read.

Floors: drafts that never pay 0.985 of no drafting, drafts that pay 0.95 of the best fixed number, text that turns bad
and comes back 0.9 of what the controller before this one reached. That one followed the clock (commit 5433ebb); on the
scenarios below, mean of 8 seeds at batch 1 and 8, it reached:

    never pays     0.957 (a draft that costs four steps) to 0.999 over the first 3000 steps, 0.996 to 0.999 after them
    pays           0.982 to 0.996 of the best fixed number
    comes back     COMES_BACK: of the best fixed number, over 1280 steps after 2000 of bad text
    changes often  CHANGES: tokens per step without drafts, over bad and good text in turns
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.draft_length.controller import (
    EXPLORE_LONGER,
    FIRST_WAIT,
    Acceptance,
    DraftLengthController,
    State,
)
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts

Cost = Callable[[int, int], float]
MOST = 4
SIZES, COUNTS = [1, 2, 4, 8, 16], [0, 1, MOST]
COMES_BACK = {(1, 0.06): 0.972, (1, 0.25): 0.953, (8, 0.06): 0.972, (8, 0.25): 0.969}  # by requests and share
CHANGES = {(1, 400, 133): 1.110, (1, 1000, 1000): 1.597, (1, 100, 100): 1.239, (8, 400, 133): 1.117,
           (8, 1000, 1000): 1.582, (8, 100, 100): 1.155}  # fmt: skip


def costs_of(cost: Cost, error: Cost = lambda requests, drafts: 1.0) -> StepCosts:
    seconds = [[cost(b, n) * error(b, n) for n in COUNTS] for b in SIZES]
    return StepCosts(CostTable(sizes=SIZES, counts=COUNTS, seconds=seconds))


class Simulation:
    """Requests whose drafts are accepted with given probabilities, in steps of given costs.

    Args:
        cost: of a step by requests and most drafts of one.
        requests: in every step.
        seed: of what is accepted.
        costs: what the controller believes (None: the truth).
        layers: cost of draft layers that run in every step but those in OFF; a request with such a step does not draft
            again.
        life: steps after which other requests come.
        switch: cost of a change between steps with and without drafts.
    """

    def __init__(
        self,
        cost: Cost,
        requests: int = 1,
        seed: int = 0,
        costs: StepCosts | None = None,
        layers: float = 0.0,
        life: int = 1 << 40,
        switch: float = 0.0,
        bypass: bool = True,
    ) -> None:
        self.cost, self.requests, self.layers, self.life, self.switch = cost, requests, layers, life, switch
        self.controller = DraftLengthController(costs_of(cost) if costs is None else costs)
        self.rng, self.kind, self.bypass = np.random.default_rng(seed), 0, bypass
        self.drafts = np.zeros(requests, dtype=np.int64)
        self.steps = self.tokens = self.skipped = self.left = self.bypassed = 0
        self.seconds, self.missed, self.drafted = 0.0, False, False
        self.chosen: list[list[int]] = []

    def run(self, steps: int, acceptance: float | list[float]) -> list[int]:
        """Run some steps; returns the most drafts of each."""
        rates, controller = np.broadcast_to(np.asarray(acceptance, dtype=float), self.requests), self.controller
        for _ in range(steps):
            self.steps += 1
            new = self.steps % self.life == 0
            skips = bool(self.layers) and controller.off and not new
            self.skipped, self.missed = self.skipped + skips, (self.missed or skips) and not new
            took = self.cost(self.requests, int(self.drafts.max())) + self.layers * (not skips)
            took += self.switch * (self.drafted != self.drafts.any())
            self.drafted = bool(self.drafts.any())
            right = self.rng.random((self.requests, MOST)) < rates[:, None]
            accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), self.drafts)
            self.tokens, self.seconds = self.tokens + int((1 + accepted).sum()), self.seconds + took
            if self.left and not new:
                self.left, self.bypassed = self.left - 1, self.bypassed + 1
            else:
                self.left = 0
                controller.skip(self.bypassed)
                controller.observe([f"{i} of {self.steps // self.life}" for i in range(self.requests)], 1 + accepted)
                allowed = np.full(self.requests, 0 if self.missed else MOST)
                kinds = np.full(self.requests, self.kind)
                self.drafts = controller.choose(allowed, self.requests, kinds)
                self.left, self.bypassed = controller.steps_off() if self.bypass else 0, 0
            self.chosen.append(self.drafts.tolist())
        return [max(drafts) for drafts in self.chosen[-steps:]]

    def speed(self, steps: int, acceptance: float | list[float]) -> float:
        """Tokens per cost over some steps, in units of those without drafts."""
        tokens, seconds = self.tokens, self.seconds
        self.run(steps, acceptance)
        return (self.tokens - tokens) / (self.seconds - seconds) * self.cost(self.requests, 0) / self.requests


def shallow(share: float) -> Cost:
    """Drafts that cost a share of a step each, whatever the batch."""
    return lambda requests, drafts: 1 + share * drafts


def predicted(acceptance: float, share: float) -> list[float]:
    """Speed-up of 0, 1, ... drafts a step."""
    return [sum(acceptance**i for i in range(n + 1)) / (1 + share * n) for n in range(MOST + 1)]


# ---- the floors

NEVER = [(0.02, 0.25), (0.2, 0.5), (0.3, 0.9), (0.6, 1.5), (0.0, 0.02), (0.0, 4.0)]
PAYS = [(0.9, 0.1), (0.6, 0.25), (0.5, 0.05), (0.3, 0.1), (0.95, 0.5)]


@pytest.mark.parametrize(("acceptance", "share"), NEVER)
@pytest.mark.parametrize("requests", [1, 8])
def test_drafts_that_never_pay(acceptance: float, share: float, requests: int) -> None:
    engine = Simulation(shallow(share), requests)
    assert min(engine.speed(3000, acceptance) for _ in range(2)) > 0.985  # from the first step on


@pytest.mark.parametrize(("acceptance", "share"), PAYS)
@pytest.mark.parametrize("requests", [1, 8])
def test_drafts_that_pay(acceptance: float, share: float, requests: int) -> None:
    engine = Simulation(shallow(share), requests)
    engine.run(500, acceptance)
    assert engine.speed(3000, acceptance) > 0.95 * max(predicted(acceptance, share))


@pytest.mark.parametrize(("requests", "share"), COMES_BACK)
def test_text_that_comes_back(requests: int, share: float) -> None:
    speeds = []
    for seed in range(4):
        engine = Simulation(shallow(share), requests, seed)
        engine.run(2000, 0.02)
        speeds.append(engine.speed(1280, 0.9) / max(predicted(0.9, share)))
    assert np.mean(speeds) > 0.9 * COMES_BACK[requests, share]


@pytest.mark.parametrize(("requests", "bad", "good"), CHANGES)
def test_text_that_changes_often(requests: int, bad: int, good: int) -> None:
    engine = Simulation(shallow(0.25), requests)
    engine.run(500, 0.9)
    tokens, seconds = engine.tokens, engine.seconds
    for _ in range(5 if good == 1000 else 12):
        engine.run(bad, 0.02)
        engine.run(good, 0.9)
    assert (engine.tokens - tokens) / (engine.seconds - seconds) / requests > 0.9 * CHANGES[requests, bad, good]


@pytest.mark.parametrize("requests", [1, 8])
def test_draft_layers_that_are_skipped(requests: int) -> None:
    """Requests that missed tokens do not draft again, those that come later do."""
    engine = Simulation(shallow(0.1), requests, layers=0.15, life=100)
    engine.run(300, 0.02)
    skipped = engine.skipped
    assert engine.speed(3000, 0.02) > 0.98
    assert engine.skipped - skipped > 2800
    engine.run(2000, 0.9)
    skipped = engine.skipped
    assert engine.speed(1000, 0.9) > 0.9 * max(predicted(0.9, 0.1)) / 1.15
    assert engine.skipped - skipped < 50


# ---- how it gets there


@pytest.mark.parametrize("error", [0.92, 1.08])
def test_costs_that_were_measured_inexactly(error: float) -> None:
    """Steps with drafts are measured 8 % too fast or too slow: no more than that is lost by it."""
    costs = costs_of(shallow(0.2), lambda requests, drafts: error if drafts else 1.0)
    engine = Simulation(shallow(0.2), costs=costs)
    engine.run(500, 0.8)
    assert engine.speed(3000, 0.8) > 0.92 * max(predicted(0.8, 0.2))
    engine.run(500, 0.05)
    assert engine.speed(3000, 0.05) > 0.92


def test_a_switch_between_steps_with_and_without_drafts_costs_little() -> None:
    for acceptance, floor in ((0.02, 0.98), (0.25, 0.96)):  # 0.25: as good with a draft as without
        assert Simulation(shallow(0.25), switch=0.5).speed(4000, acceptance) > floor


def test_comes_back_when_the_load_changes() -> None:
    """Drafts that cost little in a small batch and a step each in a large one."""
    cost: Cost = lambda requests, drafts: 1 + drafts * (0.1 if requests < 8 else 1.5)  # noqa: E731
    engine = Simulation(cost)
    for requests, pays in ((2, True), (16, False), (2, True), (16, False)):
        engine.requests, engine.drafts = requests, np.zeros(requests, dtype=np.int64)
        engine.left = 0
        engine.run(200, 0.7)
        assert bool(np.mean(engine.run(500, 0.7)) > 2) is pays


def test_explorations_become_rarer_until_they_take_a_share_of_the_time() -> None:
    engine = Simulation(shallow(1.0))
    drafting = np.flatnonzero(engine.run(6000, 0.0)[100:])
    gaps = np.diff(drafting)
    assert gaps[0] >= 2 * FIRST_WAIT and (np.diff(gaps) >= 0).all()
    assert gaps[-3:].tolist() == [256, 256, 256]


def test_a_step_that_pays_resets_the_waits() -> None:
    engine = Simulation(shallow(0.5))
    engine.run(5000, 0.0)
    engine.run(600, 0.95)
    assert engine.controller.state is State.DRAFTING
    most = engine.run(100, 0.0)
    off = most.index(0)
    assert most[off : off + FIRST_WAIT + 1].index(1) == FIRST_WAIT


def test_explorations_of_a_kind_of_requests_say_nothing_of_others() -> None:
    """As of sampling requests, when greedy ones come."""
    engine = Simulation(shallow(0.25), life=100)
    engine.run(2000, 0.0)
    assert engine.controller.state in (State.OFF, State.EXPLORING)
    engine.kind, engine.left = 1, 0
    engine.run(1, 0.9)
    assert engine.controller.state is State.WARMUP
    assert np.mean(np.array(engine.run(300, 0.9)) > 0) > 0.9
    assert engine.controller.state is State.DRAFTING


def test_another_draft_is_tried_now_and_then() -> None:
    engine = Simulation(shallow(0.3))
    most = np.array(engine.run(2000, 0.5))
    usual = int(np.median(most))
    longer = np.flatnonzero(most > usual)
    assert 0 < usual < MOST and 0 < len(longer) < 2000 / EXPLORE_LONGER * 4


def test_requests_of_a_batch_differ() -> None:
    rates = [0.9] * 4 + [0.02] * 4
    engine = Simulation(shallow(0.2), 8)
    engine.run(500, rates)
    start = len(engine.chosen)
    engine.run(1000, rates)
    mean = np.mean(engine.chosen[start:], axis=0)
    assert mean[:4].min() > 2 and mean[4:].max() < 0.6


@pytest.mark.parametrize("layers", [0.0, 0.1])
def test_bypassed_steps_change_no_choice(layers: float) -> None:
    bypassed, stepped = (Simulation(shallow(0.3), 2, layers=layers, life=300, bypass=on) for on in (True, False))
    for engine in (bypassed, stepped):
        for rate in (0.02, 0.9, 0.02):
            engine.run(1500, rate)
    assert bypassed.chosen == stepped.chosen and bypassed.skipped == stepped.skipped


def test_what_is_suppressed_is_counted() -> None:
    controller, none = DraftLengthController(costs_of(shallow(1.0))), np.zeros(2, dtype=np.int64)
    controller.observe(["a", "b"], np.array([1, 1]))
    drafts = controller.choose(np.array([4, 2]), 2, none)
    assert not drafts.any() and controller.suppressed == 6 and controller.off
    controller.choose(none, 2, none)
    assert controller.suppressed == 0 and controller.off and controller.steps_off() > 10_000


# ---- acceptance


def test_what_is_known_of_a_request_follows_it() -> None:
    acceptance = Acceptance(2)
    acceptance.align(["a", "b", "c"])
    for _ in range(40):
        acceptance.learn(np.array([2, 2, 2]), np.array([2, 0, 1]))
    known = acceptance.probabilities()
    assert acceptance.align(["c", "new", "a"]) is not None and acceptance.align(["c", "new", "a"]) is None
    np.testing.assert_allclose(acceptance.probabilities()[[0, 2]], known[[2, 0]])
    assert known[0, 1] > 0.8 and known[1, 0] < 0.2 and acceptance.trials[1].sum() == 0


def test_drafts_behind_a_rejected_draft_are_no_trials() -> None:
    acceptance = Acceptance(3)
    acceptance.align(["a"])
    acceptance.learn(np.array([3]), np.array([1]))
    assert acceptance.trials.tolist() == [[1, 1, 0]] and acceptance.hits.tolist() == [[1, 0, 0]]


def test_a_new_request_is_what_others_of_its_kind_are() -> None:
    acceptance = Acceptance(1)
    acceptance.align(["a", "b"])
    acceptance.kinds = np.array([0, 1])
    for _ in range(200):
        acceptance.learn(np.array([1, 1]), np.array([1, 0]))
    acceptance.align(["c", "d"])
    acceptance.kinds = np.array([0, 1])
    greedy, sampled = acceptance.probabilities()[:, 0]
    assert greedy > 0.9 and sampled < 0.1


# ---- costs


def test_costs_between_and_beyond_what_was_measured() -> None:
    table = CostTable(sizes=[1, 4, 8], counts=[0, 1, 3], seconds=[[10, 12, 14], [20, 26, 38], [40, 52, 80]])
    costs = StepCosts(table)
    np.testing.assert_allclose(costs.relative(1), [1, 1.2, 1.3, 1.4])
    np.testing.assert_allclose(costs.relative(6), np.array([30, 39, 49, 59]) / 30)
    np.testing.assert_allclose(costs.relative(12), np.array([60, 78, 100, 122]) / 60)
    np.testing.assert_allclose(costs.relative(1000), np.array([5, 6.5, 8.5, 10.5]) / 5, rtol=0.01)


def test_costs_never_fall_with_requests_or_drafts() -> None:
    """A table of which two entries were measured while something else ran on the machine."""
    clean = CostTable(sizes=[1, 4], counts=[0, 1, 3], seconds=[[1.0, 1.5, 2.0], [2.0, 2.5, 3.0]])
    noisy = CostTable(sizes=[1, 4], counts=[0, 1, 3], seconds=[[7.0, 1.5, 2.0], [2.0, 9.0, 3.0]])
    assert StepCosts(clean).relative(1).tolist() == [1.0, 1.5, 1.75, 2.0]
    assert StepCosts(noisy).relative(1).tolist() == [1.0, 1.0, 1 + 1 / 6, 4 / 3]
    assert StepCosts(noisy).relative(4).tolist() == [1.0, 1.5, 1.5, 1.5]


BUSY, RISING = [[20.3, 20.3 * 18.51], [23.3, 23.3 * 1.48], [17.1, 17.1 * 4.48]], [[5.0, 6.0], [6.0, 8.0]]


@pytest.mark.parametrize(
    ("sizes", "counts", "fastest", "second", "message"),
    [
        # Measured while other programs ran, and every later start read it.
        ([1, 4, 16], [0, 3], BUSY, BUSY, "1 request with 3 drafts 375"),
        ([1, 4, 16], [0, 3], BUSY, None, "not recorded"),
        ([1, 4], [0, 1], RISING, [[5.2, 6.1], [9.0, 8.2]], "4 requests with 0 drafts 6000.0 ms, and"),
        ([1, 4], [0, 1], RISING, [[5.2, 6.1], [6.3, 8.2]], ""),
    ],
)
def test_a_table_of_a_busy_machine_is_implausible(
    sizes: list[int], counts: list[int], fastest: Any, second: Any, message: str
) -> None:
    reason = CostTable(sizes=sizes, counts=counts, seconds=fastest, second_fastest=second).implausible()
    assert message in reason and bool(reason) is bool(message)


@pytest.mark.parametrize("growth", [0.0, 0.3])
def test_a_table_of_noisy_rounds_is_plausible(growth: float) -> None:
    """Rounds that are a few per cent too slow, and now and then one that takes twice its time."""
    rng, truth = np.random.default_rng(0), 1 + growth * np.add.outer(np.arange(4), np.arange(3))
    for _ in range(300):
        late = rng.exponential(0.04, (5, 4, 3)) + (rng.random((5, 4, 3)) < 0.02)
        fastest, second = np.sort(truth * (1 + late), axis=0)[:2]
        table = CostTable(
            sizes=[1, 4, 16, 64], counts=[0, 1, 3], seconds=fastest.tolist(), second_fastest=second.tolist()
        )
        assert not table.implausible()
