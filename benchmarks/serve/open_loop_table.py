# SPDX-License-Identifier: Apache-2.0
"""What served requests of the open loop come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_ppd.benchmarks.harness import cells
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.benchmarks.serve.open_loop import open_loop
from vllm_ppd.benchmarks.serve.options import OpenLoopOptions
from vllm_ppd.heads.calibration.tables import table as markdown

ALL_AT_ONCE = "inf"
Requests = list[Sequence[float]]  # fields as Served has them

LEGEND = """\
Ratios: how many times as long vLLM alone takes (the mean of its two engines) for the same requests, summed over them:
latency from arrival to last token, TPOT for each token after the first, TTFT up to the first, engine for the seconds
that the engine computed, a step's divided among its requests by the tokens that it took in of each. Intervals at 90 %,
by bootstrap over requests. drafting: share of steps with drafts, each counted for every request in it. tokens a second:
of each request, waiting included. Rows with "all" are of several cells: geometric means."""


def run(options: OpenLoopOptions) -> str:
    """Measure; the table of all temperatures."""
    return table(open_loop(options))


def rows_of(everything: Sequence[Measured]) -> list[Row]:
    """The rows of runs that differ in temperature alone."""

    def measure(served: Mapping[str, Requests], name: str) -> cells.Ratios:
        base, control, own = (seconds(served[one]) for one in (BASE, CONTROL, name))
        sums = {what: ((base[what] + control[what]) / 2, own[what]) for what in own}
        latency, tokens, steps, drafting = np.array(served[name])[:, 1:5].T
        return cells.Ratios(sums, float(drafting.sum() / steps.sum()), float(tokens.sum() / latency.sum()))

    found = cells.observations(
        everything, lambda turn: ALL_AT_ONCE if turn["rate"] is None else f"{turn['rate']:g}",
        lambda turn: turn["requests"],
    )  # fmt: skip
    return cells.rows_of(found, measure, "rate", "requests")


def seconds(served: Requests) -> dict[str, np.ndarray]:
    """[requests] by what they are of."""
    first, latency, tokens, *_, engine = np.array(served).T
    each = (latency - first) / np.maximum(tokens - 1, 1)
    return {"latency": latency, "TPOT": each, "TTFT": first, "engine": engine}


def table(everything: Sequence[Measured]) -> str:
    """Markdown, with the legend below."""
    rows = rows_of(everything)
    return f"{markdown(list(rows[0]), [list(row.values()) for row in rows])}\n\n{LEGEND}" if rows else "no requests"
