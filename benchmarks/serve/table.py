# SPDX-License-Identifier: Apache-2.0
"""The table of `ppd bench serve`."""

from __future__ import annotations

from vllm_ppd.benchmarks.harness.estimates import number, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.benchmarks.serve.run import load_rows
from vllm_ppd.heads.calibration.tables import table as markdown

COLUMNS = (
    "load", "contender", "TTFT ms", "TPOT ms", "ITL ms", "latency ms", "requests/s", "tokens/s",
    "TTFT x (quartiles)", "TPOT x (quartiles)", "latency x (quartiles)", "tokens/s x (quartiles)",
    "length", "rate", "prefix hits",
)  # fmt: skip

LEGEND = """\
load: requests that come at random at a mean rate, or all at once, or so many at once, the next when one ends.
TTFT, TPOT, ITL, latency: to the first token, a token after it, between messages, whole; median / 95th percentile of a
turn's requests as `vllm bench serve` computes them, the median of the turns. A message holds all tokens of a step.
x: how many times better than vLLM without speculation in the same round, by the requests' medians; above 1 is better.
tokens/s: generated, of all requests together; at a rate that is kept up with, as many as are asked for.
length, rate: 1 + accepted / drafts, accepted / drafted tokens, by vLLM's counters (chain drafts, bonus token included).
prefix hits: share of the prompts' tokens that were in the prefix cache."""


def table(measured: Measured) -> str:
    """Markdown, with what was measured above it and what the columns mean below."""
    run = measured.run
    options = run["options"]
    lines = [
        f"{options['model']}, {options['dtype']}, temperature {options['temperature']}; {options['requests']} requests "
        f"a turn of {options['prompt_tokens']} + {options['new_tokens']} tokens (medians, log-normal), "
        f"{options['shared']:.0%} of them after {options['shared_tokens']} common ones; {run['machine']}"
        + measured.before,
        "",
        body(measured),
        "",
        LEGEND,
    ]
    lines += [
        f"failed: {row['failed']} requests of {row['contender']}, {row['load']}"
        for row in load_rows(measured)
        if row["failed"]
    ]
    lines += [f"left out: {reason}" for reason in run["failures"].values()]
    return "\n".join(lines)


def body(measured: Measured) -> str:
    """The table alone."""
    return markdown(COLUMNS, [_cells(row) for row in load_rows(measured)])


def _cells(row: Row) -> list[str]:
    return [
        str(row["load"]),
        row["contender"],
        *("{:.1f} / {:.1f}".format(*row[time]) for time in ("ttft", "tpot", "itl", "e2el")),
        f"{row['requests_per_second']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        *(with_quartiles(row[f"faster_{what}"], 3) for what in ("ttft", "tpot", "e2el", "tokens")),
        number(row["length"], "{:.2f}"),
        number(row["rate"], "{:.3f}"),
        number(row["prefix_hits"], "{:.1%}"),
    ]
