# SPDX-License-Identifier: Apache-2.0
"""What pairs of turns of the closed loop come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_ppd.benchmarks.decode.closed_loop import Pair, closed_loop
from vllm_ppd.benchmarks.decode.options import ClosedLoopOptions
from vllm_ppd.benchmarks.harness import cells
from vllm_ppd.benchmarks.harness.results import Measured, Row, Turn
from vllm_ppd.heads.calibration.tables import table as markdown

LEGEND = """\
overall: tokens over those that vLLM alone gives in the same seconds, at its speed in the turns right before and after
(engines of vLLM alone: in all of its turns of the same pair), over all pairs; interval: at 90 %, by bootstrap over
pairs. drafting: share of steps with drafts. Rows with "all" are of several cells: geometric means."""


def run(options: ClosedLoopOptions) -> str:
    """Measure; the table of all temperatures."""
    return table(closed_loop(options))


def pairs_of(everything: Sequence[Measured]) -> dict[cells.Cell, dict[str, list[Pair]]]:
    """Pairs by cell and contender."""

    def found_in(turn: Turn) -> list[Pair]:
        return [Pair(*(turn[field] for field in Pair._fields))]

    return cells.observations(everything, lambda turn: int(turn["batch"]), found_in)


def rows_of(everything: Sequence[Measured]) -> list[Row]:
    """The rows of runs that differ in temperature alone."""
    steps = everything[0].run["options"]["steps"] if everything else 0

    def measure(pairs: Mapping[str, list[Pair]], name: str) -> cells.Ratios:
        tokens, seconds, drafting, plain_tokens, plain_seconds = np.array(pairs[name]).T
        expected = seconds * plain_tokens / plain_seconds  # tokens of vLLM alone in the same seconds
        share = float(drafting.sum()) / (2 * steps * len(tokens))
        return cells.Ratios({"overall": (tokens, expected)}, share, float(tokens.sum() / seconds.sum()))

    return cells.rows_of(pairs_of(everything), measure, "batch", "pairs")


def table(everything: Sequence[Measured]) -> str:
    """Markdown, with the legend below."""
    rows = rows_of(everything)
    return f"{markdown(list(rows[0]), [list(row.values()) for row in rows])}\n\n{LEGEND}" if rows else "no pairs"
