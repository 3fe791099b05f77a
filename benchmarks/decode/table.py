# SPDX-License-Identifier: Apache-2.0
"""Turns of `ppd bench decode`: their summary, and the table of it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm_ppd.benchmarks.harness.estimates import number, quartiles, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row, Turn
from vllm_ppd.heads.in_words import table as markdown

SUMS = ("drafts", "draft_tokens", "accepted_tokens", "same_tokens", "compared_tokens", "repeated_4_grams",
        "all_4_grams")  # fmt: skip
COLUMNS = (
    "batch", "contender", "tokens/s (quartiles)", "speed-up (quartiles)", "predicted", "step ms", "length", "rate",
    "same tokens", "repeated 4-grams", "verify + draft + host ms", "memory MB",
)  # fmt: skip

LEGEND = """\
tokens/s: of all requests together while all decode, without prefill and the tail of a batch.
speed-up: over vLLM without speculation, whose turn is in the same round.
predicted: the speed-up by `ppd plan`, from the heads' calibration and the base's steps; of a worker group by PPD's
Theorem 4.1, from its measured match rate.
length, rate: 1 + accepted / drafts, accepted / drafted tokens, by vLLM's counters (chain drafts, bonus token included).
same tokens: equal to vLLM's without speculation at their place (greedy); "vLLM, again" is what numerics alone change.
verify, draft, host: the worker but for drafting (forward pass over base token and drafts, DynaMo's layers within it,
sampling), drafting, and the rest of the step (scheduling, output); of the host's time, "-" where workers are
processes of their own.
memory: the most that was held, of the GPU where there is one, else by the processes with their libraries."""


def rows_of(measured: Measured) -> list[Row]:
    """A row a contender and batch size."""
    sizes = sorted(size for (size,) in measured.places("batch"))
    rows = (summarise(measured, name, size) for size in sizes for name in measured.contenders)
    return [row for row in rows if row is not None]


def summarise(measured: Measured, name: str, batch: int) -> Row | None:
    """Medians and quartiles over a contender's turns; ratios are to the base's turn of the same round."""
    pairs = measured.paired(name, batch=batch)
    if not pairs:
        return None
    turns = [turn for turn, _ in pairs]
    sums = {key: sum(turn[key] for turn in turns) for key in SUMS}
    ours: dict[str, float] = defaultdict(float)
    for turn in turns:
        for key, value in turn.get("ours", {}).items():
            ours[key] += value
    return {
        "contender": name,
        "batch": batch,
        "turns": len(turns),
        "tokens_per_second": quartiles([_speed(turn) for turn in turns]),
        "speed_up": quartiles([_speed(turn) / _speed(base) for turn, base in pairs]),
        "predicted": measured.run.get("predicted", {}).get(name, {}).get(str(batch)),
        "drafts": sums["drafts"],
        "step_ms": 1e3 * statistics.median(turn["step_seconds"] for turn in turns),
        "length": 1 + sums["accepted_tokens"] / sums["drafts"] if sums["drafts"] else None,
        "rate": sums["accepted_tokens"] / sums["draft_tokens"] if sums["draft_tokens"] else None,
        "consistency": sums["same_tokens"] / sums["compared_tokens"] if sums["compared_tokens"] else None,
        "repeated_4_grams": sums["repeated_4_grams"] / sums["all_4_grams"] if sums["all_4_grams"] else 0.0,
        **_split(turns),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "ours": dict(ours),
    }


def _split(turns: list[Turn]) -> dict[str, float | None]:
    """Milliseconds a step of verification, drafting and the host: means of steps, the median of the turns."""
    if any(turn["worker_seconds"] is None for turn in turns):
        return {"verify_ms": None, "draft_ms": None, "host_ms": None}

    def median(seconds: Callable[[Turn], float]) -> float:
        return statistics.median(1e3 * seconds(turn) / turn["steps"] for turn in turns)

    return {
        "verify_ms": median(lambda turn: turn["worker_seconds"] - turn["draft_seconds"]),
        "draft_ms": median(lambda turn: turn["draft_seconds"]),
        "host_ms": median(lambda turn: turn["window_seconds"] - turn["worker_seconds"]),
    }


def _speed(turn: Turn) -> float:
    return turn["window_tokens"] / turn["window_seconds"]


def body(measured: Measured) -> str:
    """Markdown: the table, with what was measured above it and who was left out below."""
    options = measured.run["options"]
    top_p = f", top-p {options['top_p']:g}" if options["temperature"] and options.get("top_p", 1) < 1 else ""
    steps = f", turns of {options['turn_steps']} steps" if options.get("turn_steps") else ""
    about = (
        f"{options['model']}, {options['dtype']}, temperature {options['temperature']}{top_p}, "
        f"{options['prompt_tokens']} + {options['new_tokens']} tokens{steps}; {measured.run['machine']}"
        f"{measured.before}"
    )
    return "\n".join([about, "", markdown(COLUMNS, list(map(_cells, rows_of(measured)))), *measured.notes])


def table(measured: Measured) -> str:
    """The same, with what the columns mean."""
    return f"{body(measured)}\n\n{LEGEND}"


def _cells(row: dict[str, Any]) -> list[str]:
    split = [row["verify_ms"], row["draft_ms"], row["host_ms"]]
    return [
        str(row["batch"]),
        row["contender"],
        with_quartiles(row["tokens_per_second"], 1),
        with_quartiles(row["speed_up"], 3),
        number(row["predicted"], "{:.3f}"),
        f"{row['step_ms']:.2f}",
        number(row["length"], "{:.2f}"),
        number(row["rate"], "{:.3f}"),
        number(row["consistency"], "{:.2%}"),
        f"{row['repeated_4_grams']:.3f}",
        " + ".join(f"{value:.2f}" for value in split) if None not in split else "-",
        f"{row['peak_bytes'] / 1e6:.0f}",
    ]
