# SPDX-License-Identifier: Apache-2.0
"""What served requests of the open loop come to: a row a cell and contender, and rows of several cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.estimates import Estimate, joined, mean_of, ratio
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.benchmarks.serve.open_loop import open_loop
from vllm_ppd.benchmarks.serve.options import OpenLoopOptions
from vllm_ppd.heads.calibration.tables import table as markdown

Cell = tuple[float, str]  # temperature, rate
ALL_AT_ONCE = "inf"

LEGEND = """\
Ratios: how many times as long vLLM alone takes (the mean of its two engines) for the same requests, summed over them:
latency from arrival to last token, TPOT for each token after the first, TTFT up to the first, engine for the seconds
that the engine computed, a step's divided among its requests by the tokens that it took in of each. Intervals at 90 %,
by bootstrap over requests. drafting: share of steps with drafts, each counted for every request in it.
Rows with "all" are of several cells: geometric means."""


def run(options: OpenLoopOptions) -> str:
    """Measure; the table of all temperatures."""
    return table(open_loop(options))


def served_of(measured: Measured) -> dict[Cell, dict[str, list[Sequence[float]]]]:
    """Requests by cell and contender; fields as Served has them."""
    temperature = float(measured.run["options"]["temperature"])
    found: dict[Cell, dict[str, list[Sequence[float]]]] = {}
    for name in measured.contenders:
        for run in measured.runs_of(name):
            for turn in run["turns"]:
                if turn["contender"] == name:
                    rate = ALL_AT_ONCE if turn["rate"] is None else f"{turn['rate']:g}"
                    found.setdefault((temperature, rate), {}).setdefault(name, []).extend(turn["requests"])
    return found


def rows_of(everything: Sequence[Measured]) -> list[Row]:
    """The rows of runs that differ in temperature alone."""
    cells = {cell: served for measured in everything for cell, served in served_of(measured).items()}
    result: list[Row] = []
    of_cell: dict[tuple[Cell, str], tuple[Row, dict[str, Estimate]]] = {}
    generator = np.random.default_rng(0)
    for cell, served in cells.items():
        found = {name: seconds(own) for name, own in served.items()}
        for name, own in served.items():
            estimates = {
                what: ratio((found[BASE][what] + found[CONTROL][what]) / 2, mine, generator)
                for what, mine in found[name].items()
            }
            latency, tokens, steps, drafting = np.array(own)[:, 1:5].T
            row = _row(cell, name, len(own), estimates, float(drafting.sum() / steps.sum()))
            row["tokens a second of each"] = round(float(tokens.sum() / latency.sum()), 1)
            of_cell[cell, name] = row, estimates
            result.append(row)
    for temperature, rate, several in joined(list(cells)):
        for name in cells[several[0]]:
            rows, all_estimates = zip(*(of_cell[cell, name] for cell in several), strict=True)
            estimates = {what: mean_of([own[what] for own in all_estimates]) for what in all_estimates[0]}
            drafted = statistics.mean(row["drafting"] for row in rows)
            row = _row((temperature, rate), name, sum(row["requests"] for row in rows), estimates, drafted)
            result.append(row | {"tokens a second of each": ""})
    return result


def _row(cell: tuple[Any, Any], name: str, requests: int, estimates: dict[str, Estimate], drafting: float) -> Row:
    row: Row = {"temperature": cell[0], "rate": cell[1], "contender": name, "requests": requests}
    for what, estimate in estimates.items():
        row |= {what: round(estimate.value, 3), f"{what}, interval": estimate.interval}
    return row | {"drafting": round(drafting, 2)}


def seconds(served: Sequence[Sequence[float]]) -> dict[str, np.ndarray]:
    """[requests] by what they are of."""
    first, latency, tokens, *_, engine = np.array(served).T
    each = (latency - first) / np.maximum(tokens - 1, 1)
    return {"latency": latency, "TPOT": each, "TTFT": first, "engine": engine}


def table(everything: Sequence[Measured]) -> str:
    """Markdown, with the legend below."""
    rows = rows_of(everything)
    return f"{markdown(list(rows[0]), [list(row.values()) for row in rows])}\n\n{LEGEND}" if rows else "no requests"
