# SPDX-License-Identifier: Apache-2.0
"""Drafting must not cost an engine throughput at loads that take a step out of its
memory-bound range.

A deterministic simulation: the start-up measurement and the choice are the real ones,
and a roofline gives the seconds of each step. A table that ends below these batch sizes
lets drafting go on at a loss.
"""

import types
from typing import NamedTuple

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.draft_length import measure
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts

DRAFTS = 3
MAX_REQUESTS = 256
LOADS = (1, 16, 32, 64, 96, 128, 192, 256)
# Bytes per second of an H200, at the share of it that kernels reach
BANDWIDTH = 0.8 * 4.8e12
# Operations per second
BF16 = 0.7 * 989e12
FP8 = 0.7 * 1979e12


class Roofline(NamedTuple):
    """Seconds of a step of a tensor-parallel engine."""

    weights: float  # bytes per GPU
    operations: float  # per token and GPU
    peak: float  # operations per second
    overhead: float  # seconds of a step that depend on nothing
    drafting: float  # seconds of making drafts

    def step(self, requests: int, drafts: int) -> float:
        tokens = requests * (1 + drafts)
        seconds = (
            max(self.weights / BANDWIDTH, tokens * self.operations / self.peak)
            + self.overhead
        )
        if drafts:
            seconds += self.drafting
        return seconds


ENGINES = {
    "8B on one GPU": Roofline(16e9, 16e9, BF16, 0.6e-3, 0.5e-3),
    "70B on four GPUs": Roofline(35e9, 35e9, BF16, 2e-3, 1.5e-3),
    "405B in FP8 on eight GPUs": Roofline(51e9, 101e9, FP8, 4e-3, 2e-3),
}


def measured_costs(engine: Roofline, monkeypatch: pytest.MonkeyPatch) -> StepCosts:
    """What an engine measures at its start, by a clock that its steps alone move."""
    now = 0.0

    def time_steps(requests: int, counts: list[int]) -> list[float]:
        nonlocal now
        seconds = [engine.step(requests, count) for count in counts]
        now += 10 * sum(seconds) + 0.01
        return seconds

    monkeypatch.setattr(
        measure, "time", types.SimpleNamespace(perf_counter=lambda: now)
    )
    table = measure.measure_table(
        time_steps, MAX_REQUESTS, [0, DRAFTS], lambda value: value
    )
    return StepCosts(table)


def speedup(
    engine: Roofline,
    costs: StepCosts,
    requests: int,
    acceptance: float,
    steps: int = 1500,
) -> float:
    """Throughput relative to the engine without drafts, scheduled asynchronously."""
    choice = ScheduledDrafts(DRAFTS, None, MAX_REQUESTS)
    choice.follow(costs)
    rng = np.random.default_rng(0)
    names = [str(i) for i in range(requests)]
    tokens = 0
    seconds = 0.0
    drafts = 0
    unseen = None  # a step's result is known after the next one is scheduled
    for _ in range(steps):
        next_drafts = choice[requests]
        emitted = np.ones(requests, dtype=int)
        if drafts:
            emitted += np.cumprod(
                rng.random((requests, DRAFTS)) < acceptance, axis=1
            ).sum(axis=1)
        if unseen is not None:
            choice.observe(*unseen)
        everyone = [True] * requests
        unseen = (names, [drafts] * requests, emitted.tolist(), everyone, everyone)
        tokens += int(emitted.sum())
        seconds += engine.step(requests, drafts)
        drafts = next_drafts
    return tokens / seconds * engine.step(requests, 0) / requests


@pytest.mark.parametrize("length", [1.3, 1.6, 2.2])
@pytest.mark.parametrize("name", ENGINES)
def test_never_slower_at_any_load(
    name: str, length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`length` is the number of tokens of a step with three drafts; without the
    largest batch in the table a cell has 0.37 of the throughput."""
    engine = ENGINES[name]
    costs = measured_costs(engine, monkeypatch)
    roots = np.roots([1, 1, 1, 1 - length])
    acceptance = float(roots[np.isreal(roots)].real[0])
    result = {
        requests: speedup(engine, costs, requests, acceptance) for requests in LOADS
    }
    assert min(result.values()) >= 0.97, result


def test_the_batches_where_drafts_are_dearest_are_measured_first() -> None:
    assert measure.sizes_to_measure(256, 3) == ([256, 128, 1, 4, 16], [64])
    assert measure.sizes_to_measure(1, 3) == ([1], [])
    assert measure.sizes_to_measure(20, 5) == ([20, 1, 4, 16], [])
