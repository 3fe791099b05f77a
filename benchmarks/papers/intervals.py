# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals over texts, for what a paper's claim hangs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.harness.estimates import CONFIDENCE, RESAMPLES
from vllm_ppd.benchmarks.papers.table import Verdict


class Interval(NamedTuple):
    """A value, and the central CONFIDENCE of its bootstrap distribution."""

    value: float
    low: float
    high: float

    def text(self, form: str = "{:.3f}") -> str:
        value, low, high = map(form.format, self)
        return f"{value} ({low} to {high})"

    def above(self, bound: float = 0.0) -> bool | None:
        """Whether it is above a bound; None: the interval holds the bound."""
        return True if self.low > bound else False if self.high < bound else None


def over_texts(statistic: Callable[..., Any], *counts: Any) -> Interval:
    """A function of sums over texts; texts are resampled.

    Args:
        statistic: of the sums of the counts, elementwise.
        counts: [texts] each.
    """
    arrays = [np.asarray(count, dtype=np.float64) for count in counts]
    rows = np.random.default_rng(0).integers(len(arrays[0]), size=(RESAMPLES, len(arrays[0])))
    samples = statistic(*(array[rows].sum(1) for array in arrays))
    low, high = np.quantile(samples, (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2))
    return Interval(float(statistic(*(array.sum() for array in arrays))), float(low), float(high))


def rises(claim: str, where: str, interval: Interval, form: str = "{:+.3f}") -> Verdict:
    """The verdict on a claim that a difference is above 0."""
    return Verdict(claim, interval.above(), f"{where}: {interval.text(form)}")
