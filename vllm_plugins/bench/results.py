# SPDX-License-Identifier: Apache-2.0
"""What is kept of measurements: every turn, written as soon as it is over; runs are added, never overwritten.

A turn is one contender's batch. Runs are summarised together where code, versions, machine, options and checkpoints are
the same.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench import BenchError
from vllm_ppd.vllm_plugins.bench.contenders import BASE, Contender
from vllm_ppd.vllm_plugins.bench.options import DecodeOptions

Turn = dict[str, Any]
Row = dict[str, Any]
SUMS = (
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "same_tokens",
    "compared_tokens",
    "repeated_4_grams",
    "all_4_grams",
)
SAME = ("git", "versions", "machine", "options", "target_stamp")


class Results:
    """The JSON file, and the run that is being measured."""

    def __init__(self, options: DecodeOptions, contenders: Iterable[Contender]) -> None:
        """Add a run to the file.

        Raises:
            BenchError: if the file holds something else.
        """
        self.path = Path(options.out)
        self.data: dict[str, Any] = {"benchmark": "decode", "runs": []}
        if self.path.exists():
            try:
                self.data = json.loads(self.path.read_text())
                self.data["runs"].copy()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise BenchError(f"{self.path} is no file of results; give another --out") from None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run = provenance(
            options=options.essence(), target_stamp=_stamp(options.model),
            contenders={contender.name: _identity(contender) for contender in contenders},
            finished=False, failures={}, turns=[],
        )  # fmt: skip
        self.earlier = [run for run in self.data["runs"] if _alike(run, self.run)]
        self.data["runs"].append(self.run)

    def add(self, turn: Turn) -> None:
        self.run["turns"].append(turn)
        self.write()

    def fail(self, name: str, reason: str) -> None:
        self.run["failures"][name] = reason
        self.write()

    def finish(self) -> None:
        self.run["finished"] = True
        self.write()

    def write(self) -> None:
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")

    def rows(self) -> list[Row]:
        """A row a contender and batch size, over this run and those like it."""
        runs = [*self.earlier, self.run]
        same = {
            name: [run for run in runs if run["contenders"].get(name) == identity]
            for name, identity in self.run["contenders"].items()
        }
        sizes = sorted({turn["batch"] for run in runs for turn in run["turns"]})
        found = (summarise(same[name], name, size) for size in sizes for name in same)
        return [row for row in found if row is not None]


def summarise(runs: list[dict[str, Any]], name: str, batch: int) -> Row | None:
    """Medians and quartiles over turns; ratios are to the base's turn of the same round."""
    turns: list[Turn] = []
    ratios: list[float] = []
    for run in runs:
        own = [turn for turn in run["turns"] if (turn["contender"], turn["batch"]) == (name, batch)]
        # The base has a turn in each group of a round; the last before a contender's is its neighbour.
        base: dict[tuple[int, int], Turn] = {
            (turn["group"], turn["round"]): turn
            for turn in run["turns"]
            if (turn["contender"], turn["batch"]) == (BASE, batch)
        }
        turns += own
        ratios += [_speed(turn) / _speed(base[turn["group"], turn["round"]]) for turn in own]
    if not turns:
        return None
    sums: dict[str, int] = defaultdict(int)
    for turn in turns:
        for key in SUMS:
            sums[key] += turn[key]
    ours: dict[str, float] = defaultdict(float)
    for turn in turns:
        for key, value in turn.get("ours", {}).items():
            ours[key] += value
    return {
        "contender": name,
        "batch": batch,
        "turns": len(turns),
        "tokens_per_second": _quartiles([_speed(turn) for turn in turns]),
        "speed_up": _quartiles(ratios),
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
    """Milliseconds a step of each part: the mean of a turn's steps, the median of the turns."""
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


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def _identity(contender: Contender) -> dict[str, Any]:
    config = contender.speculative_config
    return {
        "speculative_config": config,
        "engine": contender.engine,
        "stamp": _stamp((config or {}).get("model")),
    }


def _stamp(folder: str | None) -> int | None:
    """When a checkpoint's weights were last written: another checkpoint in the same place is another contender."""
    times = [path.stat().st_mtime_ns for path in Path(folder).glob("*.safetensors")] if folder else []
    return max(times, default=None)


def _alike(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(run.get(key) == other[key] for key in SAME)
