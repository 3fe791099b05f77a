# SPDX-License-Identifier: Apache-2.0
"""Cells of the closed and the open loop, (temperature, load): a row a cell and contender, and rows of several cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.harness.estimates import Estimate, joined, mean_of, ratio
from vllm_ppd.benchmarks.harness.results import Measured, Row, Turn

Load = int | str
Cell = tuple[float, Load]


class Ratios(NamedTuple):
    """What a contender's observations in a cell come to."""

    sums: dict[str, tuple[np.ndarray, np.ndarray]]  # [observations] each: a ratio of sums by what it is of
    drafting: float  # share of steps with drafts
    speed: float  # tokens a second


def observations(
    everything: Sequence[Measured], load_of: Callable[[Turn], Load], found_in: Callable[[Turn], Sequence[Any]]
) -> dict[Cell, dict[str, list[Any]]]:
    """What turns hold, by cell and contender; the runs differ in temperature alone."""
    cells: dict[Cell, dict[str, list[Any]]] = {}
    for measured in everything:
        temperature = float(measured.run["options"]["temperature"])
        for name in measured.contenders:
            for run in measured.runs_of(name):
                for turn in (turn for turn in run["turns"] if turn["contender"] == name):
                    cell = cells.setdefault((temperature, load_of(turn)), {})
                    cell.setdefault(name, []).extend(found_in(turn))
    return cells


def rows_of(
    cells: Mapping[Cell, Mapping[str, list[Any]]], measure: Callable[[Mapping[str, list[Any]], str], Ratios],
    load: str, counted: str,
) -> list[Row]:  # fmt: skip
    """The table.

    Args:
        cells: observations by cell and contender.
        measure: what those of a cell come to for one contender.
        load, counted: what the columns of loads and of observations are called.
    """
    result: list[Row] = []
    of_cell: dict[tuple[Cell, str], tuple[Row, dict[str, Estimate]]] = {}
    generator = np.random.default_rng(0)

    def row(cell: tuple[Any, Any], name: str, count: int, estimates: dict[str, Estimate], drafting: float) -> Row:
        made: Row = {"temperature": cell[0], load: cell[1], "contender": name, counted: count}
        for what, estimate in estimates.items():
            made |= {what: round(estimate.value, 3), f"{what}, interval": estimate.interval}
        result.append(made | {"drafting": round(drafting, 2), "tokens a second": ""})
        return result[-1]

    for cell, found in cells.items():
        for name, own in found.items():
            measured = measure(found, name)
            estimates = {what: ratio(*sums, generator) for what, sums in measured.sums.items()}
            of_cell[cell, name] = row(cell, name, len(own), estimates, measured.drafting), estimates
            result[-1]["tokens a second"] = round(measured.speed, 1)
    for temperature, shared, several in joined(list(cells)):
        for name in cells[several[0]]:
            rows, apart = zip(*(of_cell[cell, name] for cell in several if (cell, name) in of_cell), strict=True)
            estimates = {what: mean_of([own[what] for own in apart]) for what in apart[0]}
            drafting = statistics.mean(one["drafting"] for one in rows)
            row((temperature, shared), name, sum(one[counted] for one in rows), estimates, drafting)
    return result
