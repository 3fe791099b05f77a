# SPDX-License-Identifier: Apache-2.0
"""Measures step costs when the engine has warmed up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable

GROWTH = 4  # from one measured batch size to the next
ROUNDS, ROUND_SECONDS = 5, 0.5  # most rounds of a batch size; none begins after so many seconds
SECONDS, LEAST_SIZES = 2.0, 3  # no batch size begins after so many seconds, once so many were measured


def counts_of(most: int) -> list[int]:
    """Numbers of drafts that are measured, of 0 to `most`."""
    return sorted({0, 1, most})


def measure_table(
    time_steps: Callable[[int, Sequence[int]], list[float]],
    largest: int,
    counts: list[int],
    from_first_rank: Callable[[Any], Any],
) -> CostTable:
    """Measure steps of growing batches, as many sizes as time allows.

    The fastest of a few rounds counts: whatever else runs on the machine only makes steps slower.

    Args:
        time_steps: (requests, counts) -> seconds of a step with each number of drafts.
        largest: batch size.
        counts: drafts per request, ascending from 0.
        from_first_rank: gives all tensor-parallel ranks the first one's value, as they must run the same steps.
    """
    sizes: list[int] = []
    seconds: list[list[float]] = []
    began, size = time.perf_counter(), 1
    while size <= largest and (len(sizes) < LEAST_SIZES or not from_first_rank(time.perf_counter() - began > SECONDS)):
        started, rounds = time.perf_counter(), [time_steps(size, counts)]
        while len(rounds) < ROUNDS and not from_first_rank(time.perf_counter() - started > ROUND_SECONDS):
            rounds.append(time_steps(size, counts))
        sizes.append(size)
        seconds.append(np.min(rounds, axis=0).tolist())
        size = min(size * GROWTH, largest) if size < largest else largest + 1
    return CostTable(sizes=sizes, counts=counts, seconds=from_first_rank(seconds))
