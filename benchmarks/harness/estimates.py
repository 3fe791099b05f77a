# SPDX-License-Identifier: Apache-2.0
"""Statistics of turns: quartiles, ratios of sums with bootstrap intervals, repeated text; and cells of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.9


class Estimate(NamedTuple):
    """A value and its bootstrap distribution."""

    value: float
    samples: np.ndarray  # [RESAMPLES]

    @property
    def interval(self) -> str:
        """The central CONFIDENCE of the distribution."""
        low, high = np.quantile(self.samples, (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2))
        return f"{low:.3f}-{high:.3f}"


def ratio(above: np.ndarray, below: np.ndarray, generator: np.random.Generator) -> Estimate:
    """Ratio of the sums of paired observations [n]; the pairs are resampled.

    Use one generator for all cells of a table: cells that drew the same pairs would vary together.
    """
    from scipy.stats import bootstrap

    value = float(above.sum() / below.sum())
    if len(above) < 2:
        return Estimate(value, np.full(RESAMPLES, value))
    resampled = bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=generator,
    )  # fmt: skip
    return Estimate(value, resampled.bootstrap_distribution)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def repeats(texts: list[list[int]]) -> dict[str, int]:
    """4-grams that occurred before in their text, and all: text in loops flatters acceptance."""
    grams = [[tuple(ids[i : i + 4]) for i in range(len(ids) - 3)] for ids in texts]
    return {
        "repeated_4_grams": sum(len(text) - len(set(text)) for text in grams), "all_4_grams": sum(map(len, grams)),
    }  # fmt: skip


def with_quartiles(spread: Sequence[float], digits: int) -> str:
    """A table's cell of a median and its quartiles."""
    middle, low, high = (f"{value:.{digits}f}" for value in spread)
    return f"{middle} ({low}-{high})"


def number(value: float | None, form: str) -> str:
    """A table's cell; "-" for what is not known."""
    return "-" if value is None else form.format(value)
