# SPDX-License-Identifier: Apache-2.0
"""What pairs of turns of the closed loop come to: a row a cell and contender, and rows of several cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from vllm_ppd.benchmarks.decode.closed_loop import Pair, closed_loop
from vllm_ppd.benchmarks.decode.options import ClosedLoopOptions
from vllm_ppd.benchmarks.harness.estimates import Estimate, joined, mean_of, quartiles, ratio
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.heads.calibration.tables import table as markdown

Cell = tuple[float, int]  # temperature, batch size

LEGEND = """\
overall: tokens over those that vLLM alone gives in the same seconds, at its speed in the turns right before and after
(engines of vLLM alone: in all of its turns of the same pair), over all pairs; interval: at 90 %, by bootstrap over
pairs. median, quartiles: of single pairs, or of cells. drafting: share of steps with drafts.
Rows with "all" are of several cells: geometric means."""


def run(options: ClosedLoopOptions) -> str:
    """Measure; the table of all temperatures."""
    return table(closed_loop(options))


def pairs_of(measured: Measured) -> dict[Cell, dict[str, list[Pair]]]:
    """Pairs by cell and contender."""
    temperature = float(measured.run["options"]["temperature"])
    found: dict[Cell, dict[str, list[Pair]]] = {}
    for name in measured.contenders:
        for run in measured.runs_of(name):
            for turn in run["turns"]:
                if turn["contender"] == name:
                    cell = found.setdefault((temperature, turn["batch"]), {})
                    cell.setdefault(name, []).append(Pair(*(turn[field] for field in Pair._fields)))
    return found


def rows_of(everything: Sequence[Measured]) -> list[Row]:
    """The rows of runs that differ in temperature alone."""
    cells = {cell: pairs for measured in everything for cell, pairs in pairs_of(measured).items()}
    steps = everything[0].run["options"]["steps"] if everything else 0
    result: list[Row] = []
    of_cell: dict[tuple[Cell, str], tuple[Row, Estimate]] = {}
    generator = np.random.default_rng(0)
    for cell, pairs in cells.items():
        for name, own in pairs.items():
            tokens, seconds, drafting, plain_tokens, plain_seconds = np.array(own).T
            expected = seconds * plain_tokens / plain_seconds  # tokens of vLLM alone in the same seconds
            share = float(drafting.sum()) / (2 * steps * len(own))
            overall = ratio(tokens, expected, generator)
            row = _row(cell, name, len(own), overall, (tokens / expected).tolist(), share)
            row["tokens a second"] = round(float(tokens.sum() / seconds.sum()), 1)
            of_cell[cell, name] = row, overall
            result.append(row)
    for temperature, batch, several in joined(list(cells)):
        for name in cells[several[0]]:
            rows, estimates = zip(*(of_cell[cell, name] for cell in several if (cell, name) in of_cell), strict=True)
            share = statistics.mean(row["drafting"] for row in rows)
            ratios = [row["overall"] for row in rows]
            row = _row((temperature, batch), name, sum(row["pairs"] for row in rows), mean_of(estimates), ratios, share)
            result.append(row | {"tokens a second": ""})
    return result


def _row(
    cell: tuple[float | str, int | str], name: str, pairs: int, overall: Estimate, ratios: list[float], drafting: float
) -> Row:
    middle, low, high = quartiles(ratios)
    return {
        "temperature": cell[0], "batch": cell[1], "contender": name, "pairs": pairs,
        "overall": round(overall.value, 3), "interval": overall.interval,
        "median": round(middle, 3), "quartiles": f"{low:.3f}-{high:.3f}", "drafting": round(drafting, 2),
    }  # fmt: skip


def table(everything: Sequence[Measured]) -> str:
    """Markdown, with the legend below."""
    rows = rows_of(everything)
    return "\n\n".join([markdown(list(rows[0]), [list(row.values()) for row in rows]), LEGEND]) if rows else "no pairs"
