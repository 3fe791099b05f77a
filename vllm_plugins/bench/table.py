# SPDX-License-Identifier: Apache-2.0
"""The table that a run prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_ppd.vllm_plugins.bench.results import Measured

COLUMNS = (
    "batch", "contender", "tokens/s (quartiles)", "speed-up (quartiles)", "step ms", "length", "rate", "same tokens",
    "repeated 4-grams", "verify + draft + host ms", "memory MB",
)  # fmt: skip

LEGEND = """\
tokens/s: of all requests together while all decode, without prefill and the tail of a batch.
speed-up: over vLLM without speculation, whose turn is in the same round.
length, rate: 1 + accepted / drafts, accepted / drafted tokens, by vLLM's counters (chain drafts, bonus token included).
same tokens: equal to vLLM's without speculation at their place (greedy); "vLLM, again" is what numerics alone change.
verify, draft, host: the worker but for drafting (forward pass over base token and drafts, DynaMo's layers within it,
sampling), drafting, and the rest of the step (scheduling, output); of the host's time, "-" where workers are
processes of their own.
memory: the most that was held, of the GPU where there is one, else by the processes with their libraries."""


def table(results: Measured) -> str:
    """Markdown, with what was measured above it and what the columns mean below."""
    run = results.run
    options = run["options"]
    lines = [
        f"{options['model']}, {options['dtype']}, temperature {options['temperature']}, {options['prompt_tokens']} + "
        f"{options['new_tokens']} tokens; {run['machine']}{results.before}",
        "",
        body(results),
        "",
        LEGEND,
    ]
    return "\n".join([*lines, *(f"left out: {reason}" for reason in run["failures"].values())])


def body(results: Measured) -> str:
    """The table alone."""
    return rows_of(COLUMNS, "---:", [_cells(row) for row in results.rows()])


def overview(results: Measured) -> str:
    """Speed-ups alone: a row a contender, a column a batch size; lengths are of the first one."""
    rows = results.rows()
    sizes = sorted({row["batch"] for row in rows})
    cells = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = {row["batch"]: row for row in rows if row["contender"] == name}
        speeds = [with_quartiles(own[size]["speed_up"], 2) if size in own else "-" for size in sizes]
        length = number(own[sizes[0]]["length"], "{:.2f}") if sizes[0] in own else "-"
        cells.append([name, *speeds, length])
    header = ["contender", *(f"batch {size}" for size in sizes), f"length, batch {sizes[0]}"]
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def rows_of(columns: Sequence[str], first: str, cells: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column stands as told, the second left, the others right."""
    lines = [f"| {' | '.join(columns)} |", f"| {first} | --- |{' ---: |' * (len(columns) - 2)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _cells(row: dict[str, Any]) -> list[str]:
    parts = [row["verify_ms"], row["draft_ms"], row["host_ms"]]
    return [
        str(row["batch"]),
        row["contender"],
        with_quartiles(row["tokens_per_second"], 1),
        with_quartiles(row["speed_up"], 3),
        f"{row['step_ms']:.2f}",
        number(row["length"], "{:.2f}"),
        number(row["rate"], "{:.3f}"),
        number(row["consistency"], "{:.2%}"),
        f"{row['repeated_4_grams']:.3f}",
        " + ".join(f"{part:.2f}" for part in parts) if None not in parts else "-",
        f"{row['peak_bytes'] / 1e6:.0f}",
    ]


def with_quartiles(found: tuple[float, float, float], digits: int) -> str:
    """A median and its quartiles, as quartiles() gives them."""
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({low}-{high})"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
