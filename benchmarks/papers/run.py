# SPDX-License-Identifier: Apache-2.0
"""Which tables are measured, and what is kept: each table is written as soon as it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.benchmarks.papers import Measure, PaperTable, cp, dynamo, paradecode, ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.render import render
from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.training.provenance import provenance

PAPERS = {"ppd": ppd, "paradecode": paradecode, "cp": cp, "dynamo": dynamo}


def chosen(only: tuple[str, ...]) -> dict[str, tuple[Measure, str]]:
    """The tables asked for, in the papers' order: how each is measured, and the kind of heads it needs.

    Raises:
        BenchError: on a name that is neither a table nor a paper.
    """
    known = {key: (measure, paper.KIND) for paper in PAPERS.values() for key, measure in paper.TABLES.items()}
    wanted: set[str] = set()
    for name in only or tuple(PAPERS):
        found = PAPERS[name].TABLES.keys() if name in PAPERS else {name} & known.keys()
        if not found:
            raise BenchError(f"--only {name}: no such table; there are {', '.join(known)}")
        wanted |= set(found)
    return {key: found for key, found in known.items() if key in wanted}


class Kept:
    """The JSON file of tables; entries are added, never overwritten, and the last of a table counts.

    Raises:
        BenchError: if the file holds something else.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.data: dict[str, Any] = {"benchmark": "tables", "tables": []}
        if self.path.exists():
            try:
                self.data = json.loads(self.path.read_text())
                sound = self.data["benchmark"] == "tables" and isinstance(self.data["tables"], list)
            except (ValueError, KeyError, TypeError):
                sound = False
            if not sound:
                raise BenchError(f"{self.path} is no file of tables; give another --out")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def find(self, key: str, identity: dict[str, Any]) -> PaperTable | None:
        """The last such table of the same model, data, heads and options."""
        same = (e for e in reversed(self.data["tables"]) if e["key"] == key and e["identity"] == identity)
        entry = next(same, None)
        return None if entry is None else PaperTable.from_json(entry)

    def add(self, table: PaperTable, identity: dict[str, Any]) -> None:
        entry = json.loads(json.dumps(provenance(identity=identity, **table.to_json())))
        self.data["tables"].append(entry)
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")


def run(options: TablesOptions) -> str | None:
    """Measure; the tables and what was left out, None if there is no table."""
    tables, left_out = make_tables(options)
    text = "\n\n".join([*map(render, tables), *(f"left out: {key}: {reason}" for key, reason in left_out.items())])
    if not tables:
        print(text)
    return text if tables else None


def make_tables(options: TablesOptions) -> tuple[list[PaperTable], dict[str, str]]:
    """Measure what is not there yet.

    Returns:
        The tables asked for, and why others were left out.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit.
        Stopped: on Ctrl-C.
    """
    wanted, kept, context = chosen(options.only), Kept(options.out), Context(options)
    tables: list[PaperTable] = []
    left_out: dict[str, str] = {}
    fresh = 0
    with tqdm(wanted.items(), desc="tables", mininterval=1) as progress:
        for key, (measure, kind) in progress:
            progress.set_postfix_str(key)
            identity = _identity(context, kind)
            table = None if options.again else kept.find(key, identity)
            try:
                if table is None:
                    context.heads(kind)
                    table = measure(context)
                    kept.add(table, identity)
                    fresh += 1
            except BenchError as error:
                left_out[key] = str(error)
                tqdm.write(f"left out: {key}: {error}")
                continue
            except KeyboardInterrupt:
                raise Stopped(
                    f"stopped at {key}; {fresh} new tables are kept in {options.out}, the same command goes on there"
                ) from None
            tables.append(table)
    return tables, left_out


def _identity(context: Context, kind: str) -> dict[str, Any]:
    """What a table was measured on: files by size and time of change."""
    options = context.options
    heads = [
        [Path(folder).name, *_stamps(sorted(Path(folder).glob("*.safetensors")))] for folder in context.folders[kind]
    ]
    return {
        "model": options.model,
        "model_files": _stamps(sorted(Path(options.model).glob("*.safetensors"))),
        "tasks": {name: _stamps(expand([path])) for name, path in map(named, options.task)},
        "heads": heads,
        "options": options.essence(),
    }


def _stamps(files: list[Path]) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
