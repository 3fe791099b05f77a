# SPDX-License-Identifier: Apache-2.0
"""The measurement of step costs when the engine has warmed up."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable

logger = logging.getLogger("vllm.vllm_ppd")

GROWTH = 4  # factor between measured batch sizes
LEAST_ROUNDS, ROUNDS, ROUND_SECONDS = 2, 5, 0.5  # per batch size; no further rounds start after these seconds
SECONDS, LEAST_SIZES = 2.0, 3  # no batch size starts after this time if this many are measured


def counts_of(most: int) -> list[int]:
    """The numbers of drafts, within 0 to `most`, that are measured."""
    return sorted({0, 1, most})


def measure_table(
    time_steps: Callable[[int, Sequence[int]], list[float]],
    largest: int,
    counts: list[int],
    from_first_rank: Callable[[Any], Any],
) -> CostTable:
    """Measure steps of growing batches, as many sizes as time allows; once more if the result is implausible.

    The fastest round of all measurements counts, since other work on the machine only makes steps slower.

    Args:
        time_steps: (requests, counts) -> seconds of a step with each number of drafts.
        largest: batch size.
        counts: drafts per request, ascending from 0.
        from_first_rank: gives all tensor-parallel ranks the first rank's value, since they must run the same steps.
    """

    def two_fastest(size: int) -> np.ndarray:  # rounds: [2, counts]
        started, rounds = time.perf_counter(), [time_steps(size, counts)]
        while len(rounds) < LEAST_ROUNDS or (
            len(rounds) < ROUNDS and not from_first_rank(time.perf_counter() - started > ROUND_SECONDS)
        ):
            rounds.append(time_steps(size, counts))
        return np.sort(rounds, axis=0)[:2]

    sizes: list[int] = []
    measured: list[np.ndarray] = []
    began, size = time.perf_counter(), 1
    while size <= largest and (len(sizes) < LEAST_SIZES or not from_first_rank(time.perf_counter() - began > SECONDS)):
        sizes.append(size)
        measured.append(two_fastest(size))
        size = min(size * GROWTH, largest) if size < largest else largest + 1
    table = _table(sizes, counts, from_first_rank(np.array(measured)))
    if reason := table.implausible():
        logger.info("vllm-ppd: measuring step costs again, as the machine seems to have been busy: %s", reason)
        again = np.concatenate([measured, [two_fastest(size) for size in sizes]], axis=1)
        table = _table(sizes, counts, from_first_rank(np.sort(again, axis=1)))
    return table


def _table(sizes: list[int], counts: list[int], rounds: np.ndarray) -> CostTable:
    """A table of rounds [sizes, at least 2, counts], the fastest first."""
    fastest, second = rounds[:, 0].tolist(), rounds[:, 1].tolist()
    return CostTable(sizes=sizes, counts=counts, seconds=fastest, second_fastest=second)
