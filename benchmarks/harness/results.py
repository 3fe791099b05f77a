# SPDX-License-Identifier: Apache-2.0
"""Files of results, with every turn, written as soon as it ends; runs are added, never overwritten.

A turn is a contender's batch or load. Runs are summarised together if versions, machine and options are the same,
and turns of a contender if its checkpoint and its code are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.options import BenchOptions
from vllm_ppd.benchmarks.harness.sources import sources
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.training.provenance import provenance

Run = dict[str, Any]
Turn = dict[str, Any]
Row = dict[str, Any]
Config = dict[str, Any] | None
SAME = ("versions", "machine", "options", "target_stamp")


class Measured:
    """A run, with earlier runs like it, as far as they compare the same contenders.

    Args:
        run: the newest run.
        earlier: those before it.
        contenders: the identity of each shown contender, by name.
    """

    def __init__(self, run: Run, earlier: list[Run], contenders: dict[str, Any]) -> None:
        self.run, self.earlier, self.contenders = run, earlier, contenders

    def runs_of(self, name: str) -> list[Run]:
        """The runs with the current version of a contender."""
        runs = [*self.earlier, self.run]
        return [run for run in runs if run["contenders"].get(name) == self.contenders[name]]

    def paired(self, name: str, **place: Any) -> list[tuple[Turn, Turn]]:
        """A contender's turns at a load, each with the base's turn of the same round, its neighbour in time."""
        neighbours = []
        for run in self.runs_of(name):
            there = [turn for turn in run["turns"] if all(turn[key] == value for key, value in place.items())]
            # The base has a turn in each group of a round; a contender is compared with the last one before it.
            base = {(turn["group"], turn["round"]): turn for turn in there if turn["contender"] == BASE}
            neighbours += [(turn, base[turn["group"], turn["round"]]) for turn in there if turn["contender"] == name]
        return neighbours

    @property
    def notes(self) -> list[str]:
        """A line for each contender that was left out."""
        return [f"left out: {reason}" for reason in self.run["failures"].values()]

    @property
    def before(self) -> str:
        """The number of earlier runs, for the line above a table."""
        return f"; with {len(self.earlier)} earlier runs" if self.earlier else ""

    def places(self, *keys: str) -> list[tuple[Any, ...]]:
        """Every load that has turns, in order of first appearance."""
        runs = [*self.earlier, self.run]
        return list(dict.fromkeys(tuple(turn[key] for key in keys) for run in runs for turn in run["turns"]))


class Results(Measured):
    """The JSON file, and the run that is being measured."""

    def __init__(self, options: BenchOptions, contenders: Iterable[Contender], beside: Results | None = None) -> None:
        """Add a run to the file.

        Args:
            options: of the run.
            contenders: of the run.
            beside: another run of the same file that is being measured.

        Raises:
            BenchError: if the file holds something else.
        """
        self.path = Path(options.out)
        self.data: dict[str, Any] = {"benchmark": options.benchmark, "runs": []}
        if beside is not None:
            self.data = beside.data
        elif self.path.exists():
            self.data = _read(self.path)
            if self.data["benchmark"] != options.benchmark:
                raise BenchError(f"{self.path} holds results of another benchmark; give another --out")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        identities = {contender.name: _identity(contender, options.benchmark) for contender in contenders}
        run = provenance(
            options=options.essence(), target_stamp=_stamp(options.model), contenders=identities,
            finished=False, failures={}, turns=[],
        )  # fmt: skip
        super().__init__(run, [earlier for earlier in self.data["runs"] if _alike(earlier, run)], identities)
        self.data["runs"].append(run)

    def add(self, turn: Turn) -> None:
        self.run["turns"].append(turn)
        self.write()

    def fail(self, name: str, reason: str) -> None:
        self.run["failures"][name] = reason
        self.write()

    def finish(self, **facts: Any) -> None:
        """Mark the run as finished, with facts that were computed from its turns."""
        self.run |= {"finished": True, **facts}
        self.write()

    def write(self) -> None:
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")


def stored(path: Path) -> list[Measured]:
    """The runs in a file: for each set of options and machine the newest run with turns, and those like it.

    Raises:
        BenchError: if the file holds something else.
    """
    groups: dict[str, Measured] = {}
    for run in _read(path)["runs"]:
        if not run["turns"]:
            continue
        key = json.dumps([run["options"], run["machine"]], sort_keys=True)
        before = groups.get(key)
        alike = [] if before is None else [old for old in [*before.earlier, before.run] if _alike(old, run)]
        contenders = {name: identity for old in [*alike, run] for name, identity in old["contenders"].items()}
        groups[key] = Measured(run, alike, contenders)
    return list(groups.values())


def all_runs(options: BenchOptions, contenders: list[Contender], **facts: Any) -> list[Results]:
    """A run for each of the options' temperatures, in one file, with further facts.

    Raises:
        BenchError: if the file holds something else.
    """
    runs: list[Results] = []
    for each in options.runs:
        runs.append(Results(each, contenders, runs[0] if runs else None))
        runs[-1].run |= facts
    return runs


def write_rows(out: Path, benchmark: str, rows: list[Row], configs: Iterable[Config], **facts: Any) -> None:
    """Write a file of rows that were measured together with these speculative_configs, with its provenance."""
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = provenance(benchmark=benchmark, sources=sources(benchmark, configs), **facts, rows=rows)
    write_text(out, json.dumps(facts, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data["runs"].copy()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BenchError(f"{path} is not a file of results; give another --out") from None
    return data


def _identity(contender: Contender, benchmark: str) -> dict[str, Any]:
    config = contender.speculative_config
    return {
        "speculative_config": config,
        "engine": contender.engine,
        **({"environment": contender.environment} if contender.environment else {}),
        **({"shares": contender.shares, "adaptive": contender.adaptive} if contender.shares else {}),
        "stamp": _stamp((config or {}).get("model")),
        "sources": sources(benchmark, [config]),
    }


def _stamp(folder: str | None) -> int | None:
    """When a checkpoint's weights were last written, since a new checkpoint in the same folder is another contender."""
    times = [path.stat().st_mtime_ns for path in Path(folder).glob("*.safetensors")] if folder else []
    return max(times, default=None)


def _alike(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs may be summarised together; runs without a digest of their code must share the commit."""
    known = all("sources" in identity for each in (run, other) for identity in each["contenders"].values())
    return all(run.get(key) == other[key] for key in (*SAME, *([] if known else ["git"])))
