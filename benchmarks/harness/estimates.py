# SPDX-License-Identifier: Apache-2.0
"""Statistics of turns and texts (quartiles, bootstrap intervals, repeated text), and cells of tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.harness.results import Row
from vllm_ppd.heads.in_words import table

RESAMPLES = 2000
CONFIDENCE = 0.9


class Estimate(NamedTuple):
    """A value, and the central CONFIDENCE of its bootstrap distribution."""

    value: float
    low: float
    high: float

    def text(self, form: str = "{:.3f}") -> str:
        value, low, high = map(form.format, self)
        return f"{value} ({low} to {high})"


def bootstrap(statistic: Callable[..., Any], *counts: Any) -> Estimate:
    """The bootstrap estimate of a function of sums over texts; texts are resampled.

    Args:
        statistic: of the sums of the counts, elementwise.
        counts: [texts] each, or of batches of texts.
    """
    arrays = [np.asarray(count, dtype=np.float64) for count in counts]
    rows = np.random.default_rng(0).integers(len(arrays[0]), size=(RESAMPLES, len(arrays[0])))
    samples = statistic(*(array[rows].sum(1) for array in arrays))
    low, high = np.quantile(samples, (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2))
    return Estimate(float(statistic(*(array.sum() for array in arrays))), float(low), float(high))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def repeats(texts: list[list[int]]) -> dict[str, int]:
    """The number of 4-grams that occurred before in their text, and of all; loops raise acceptance."""
    grams = [[tuple(ids[i : i + 4]) for i in range(len(ids) - 3)] for ids in texts]
    return {
        "repeated_4_grams": sum(len(text) - len(set(text)) for text in grams), "all_4_grams": sum(map(len, grams)),
    }  # fmt: skip


def with_quartiles(spread: Sequence[float], digits: int) -> str:
    """A table cell with a median and its quartiles."""
    middle, low, high = (f"{value:.{digits}f}" for value in spread)
    return f"{middle} ({low}-{high})"


def number(value: float | None, form: str) -> str:
    """A table cell; "-" for unknown values."""
    return "-" if value is None else form.format(value)


def cells(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """A Markdown table of rows, with a function per column; columns without values are left out."""
    by_column = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    known = {name: column for name, column in by_column.items() if {*column} != {"-"}}
    return table(list(known), [list(line) for line in zip(*known.values(), strict=True)])
