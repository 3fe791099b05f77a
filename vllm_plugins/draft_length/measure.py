# SPDX-License-Identifier: Apache-2.0
"""The measurement of step costs when the engine has warmed up."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ppd.vllm_plugins.config.resolved import FEW_DRAFTS
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, Plan, plans_of

SIZES = (1, 16, 64, 256)  # batches that are measured beside the largest
ROUNDS = 5  # most rounds of a batch size
SECONDS = 7.0  # within which the measurement ends
GRAPH_TOKENS = 512  # tokens of the largest graph that vLLM captures by default


def counts_of(most: int, device: str) -> list[int]:
    """The numbers of drafts, within 0 to `most`, that are measured and may be chosen:
    none, half of them and all.

    A GPU needs whole-model graphs for each, so it has no half of few drafts.
    """
    half = most // 2 if device == "cpu" or most > FEW_DRAFTS else 0
    return sorted({0, half, most})


def sizes_to_measure(largest: int, max_drafts: int) -> list[int]:
    """Batch sizes, ascending.

    The cost of drafts rises where a step becomes limited by compute, and where
    verification no longer fits a graph.

    Args:
        largest: batch size.
        max_drafts: of a request.
    """
    last_with_graph = GRAPH_TOKENS // (1 + max_drafts)
    sizes = {*SIZES, last_with_graph, largest}
    return sorted(size for size in sizes if size <= largest)


def measure_table(
    time_steps: Callable[[int, Sequence[Plan]], list[float]],
    largest: int,
    counts: list[int],
    from_first_rank: Callable[[Any], Any],
    exits: int = 1,
) -> CostTable:
    """Measure steps of several batch sizes within SECONDS.

    The fastest round counts, since other work on the machine only makes steps slower.

    Args:
        time_steps: (requests, plans) -> seconds of a step with each.
        largest: batch size.
        counts: drafts per request, ascending from 0.
        from_first_rank: gives all tensor-parallel ranks the first rank's value, since
            they must run the same steps.
        exits: number of exit layers.
    """
    plans = plans_of(counts, exits)
    ends = time.perf_counter() + SECONDS
    rounds: dict[int, list[list[float]]] = {}  # ascending sizes
    round_seconds: dict[int, float] = {}

    def run(size: int) -> None:
        started = time.perf_counter()
        rounds.setdefault(size, []).append(time_steps(size, plans))
        round_seconds[size] = from_first_rank(time.perf_counter() - started)

    def seconds_left() -> float:
        return from_first_rank(ends - time.perf_counter())

    sizes = sizes_to_measure(largest, counts[-1])
    size = 1
    run(size)
    while size < sizes[-1]:
        larger = min(wanted for wanted in sizes if wanted > size)
        # A step takes at most as much longer as it has more requests. If twice as many
        # do not fit the time, steps are limited by compute, and larger ones have the
        # same relative costs.
        fitting = int(size * seconds_left() / round_seconds[size])
        if fitting < min(larger, 2 * size):
            break
        size = min(larger, fitting)
        run(size)
    for size in list(rounds) * (ROUNDS - 1):
        if round_seconds[size] < seconds_left():
            run(size)
    fastest = [
        [min(seconds) for seconds in zip(*timed, strict=True)]
        for timed in rounds.values()
    ]
    table = from_first_rank(fastest)
    return CostTable(
        sizes=list(rounds), counts=counts, exits=exits, seconds=table
    )
