# SPDX-License-Identifier: Apache-2.0
"""Statistics of turns: quartiles, ratios of sums with bootstrap intervals, geometric means over cells."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.9
ALL = "all"
Key = TypeVar("Key", bound=Hashable)


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

    Use one generator for all cells: cells that drew the same pairs would vary together.
    """
    from scipy.stats import bootstrap

    value = float(above.sum() / below.sum())
    if len(above) < 2:
        return Estimate(value, np.full(RESAMPLES, value))
    found = bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=generator,
    )  # fmt: skip
    return Estimate(value, found.bootstrap_distribution)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The geometric mean of ratios, each with its own samples."""
    samples = np.exp(np.mean([np.log(one.samples) for one in estimates], axis=0))
    return Estimate(statistics.geometric_mean(one.value for one in estimates), samples)


def joined(cells: Sequence[tuple[float, Key]]) -> list[tuple[float | str, Key | str, list[tuple[float, Key]]]]:
    """Groups of cells (temperature, load) to summarise: by load, by temperature, and all.

    Returns:
        Temperature, load (ALL where they differ) and cells of each group; only the last may be a single cell, or all.
    """
    groups: list[tuple[float | str, Key | str, list[tuple[float, Key]]]] = []
    for load in dict.fromkeys(load for _, load in cells):
        groups.append((ALL, load, [cell for cell in cells if cell[1] == load]))
    for temperature in dict.fromkeys(temperature for temperature, _ in cells):
        groups.append((temperature, ALL, [cell for cell in cells if cell[0] == temperature]))
    return [one for one in groups if 1 < len(one[2]) < len(cells)] + [(ALL, ALL, list(cells))]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def with_quartiles(found: Sequence[float], digits: int) -> str:
    """A median and its quartiles in a table's cell."""
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({low}-{high})"


def number(value: float | None, form: str) -> str:
    """A table's cell; "-" for what is not known."""
    return "-" if value is None else form.format(value)
