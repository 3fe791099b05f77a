# SPDX-License-Identifier: Apache-2.0
"""The measurement of step costs when the engine has warmed up."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ppd.vllm_plugins.config.resolved import FEW_DRAFTS
from vllm_ppd.vllm_plugins.draft_length.costs import (
    NO_DRAFTS,
    CostTable,
    Plan,
    plans_of,
)

SIZES = (1, 16, 64, 256)  # batches that are measured beside the largest
REQUIRED = 5  # sizes that are measured however long it takes
# Per batch size; no further rounds start after these seconds
LEAST_ROUNDS = 2
ROUNDS = 5
ROUND_SECONDS = 0.5
SECONDS = 8.0  # after which only the first rounds of required batch sizes start
GRAPH_TOKENS = 512  # tokens of the largest graph that vLLM captures by default


def counts_of(most: int, device: str) -> list[int]:
    """The numbers of drafts, within 0 to `most`, that are measured and may be chosen:
    none, half of them and all.

    A GPU needs whole-model graphs for each, so it has no half of few drafts.
    """
    half = most // 2 if device == "cpu" or most > FEW_DRAFTS else 0
    return sorted({0, half, most})


def sizes_to_measure(largest: int, max_drafts: int) -> list[int]:
    """Batch sizes in the order in which they are measured.

    The cost of drafts rises where a step becomes limited by compute, and where
    verification no longer fits a graph. A table that ends before these batches would
    let an engine draft there at a loss, so they come first. Small batches take little
    time and follow.

    Args:
        largest: batch size.
        max_drafts: of a request.
    """
    last_with_graph = min(max(GRAPH_TOKENS // (1 + max_drafts), 1), largest)
    smaller = [size for size in SIZES if size < largest]
    return list(dict.fromkeys([largest, last_with_graph, *smaller]))


def measure_table(
    time_steps: Callable[[int, Sequence[Plan]], list[float]],
    largest: int,
    counts: list[int],
    from_first_rank: Callable[[Any], Any],
    exits: int = 1,
) -> CostTable:
    """Measure steps of several batch sizes, as many as time allows.

    The fastest round counts, since other work on the machine only makes steps slower.
    All of it takes about SECONDS; on a slow machine the first rounds of the required
    sizes take as long again.

    Args:
        time_steps: (requests, plans) -> seconds of a step with each.
        largest: batch size.
        counts: drafts per request, ascending from 0.
        from_first_rank: gives all tensor-parallel ranks the first rank's value, since
            they must run the same steps.
        exits: number of exit layers.
    """
    plans = plans_of(counts, exits)
    began = time.perf_counter()

    def late(since: float, seconds: float) -> bool:
        return bool(from_first_rank(time.perf_counter() - since > seconds))

    def fastest(size: int) -> list[float]:
        started = time.perf_counter()
        rounds = [time_steps(size, plans)]
        while len(rounds) < ROUNDS and not late(began, SECONDS):
            if len(rounds) >= LEAST_ROUNDS and late(started, ROUND_SECONDS):
                break
            rounds.append(time_steps(size, plans))
        return [min(seconds) for seconds in zip(*rounds, strict=True)]

    # A step that is limited by compute takes a time that grows with its tokens. If a
    # round of the largest batch took longer than all the time there is, a smaller batch
    # is limited by compute, too, and has the same relative costs.
    time_steps(largest, [NO_DRAFTS])
    tokens = sum(1 + plan.drafts for plan in plans)
    seconds = (time.perf_counter() - began) * tokens
    largest = from_first_rank(
        min(max(int(largest * SECONDS / seconds), 1), largest)
    )
    measured: dict[int, list[float]] = {}
    for size in sizes_to_measure(largest, counts[-1]):
        if len(measured) >= REQUIRED and late(began, SECONDS):
            break
        measured[size] = fastest(size)
    sizes = sorted(measured)
    table = from_first_rank([measured[size] for size in sizes])
    return CostTable(sizes=sizes, counts=counts, exits=exits, seconds=table)
