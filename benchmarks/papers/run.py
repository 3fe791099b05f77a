# SPDX-License-Identifier: Apache-2.0
"""`ppd bench tables`: which tables are measured, and their file, to which each is added as soon as it is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.benchmarks.papers import cp, dynamo, paradecode, ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.table import PaperTable, read_tables, render
from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.training.provenance import provenance

PAPERS = {"ppd": ppd, "paradecode": paradecode, "cp": cp, "dynamo": dynamo}
Measure = Callable[[Context], PaperTable]


def chosen(only: tuple[str, ...]) -> dict[str, tuple[Measure, str]]:
    """The tables asked for, in the papers' order: how each is measured, and the kind of heads it needs.

    Raises:
        BenchError: on a name that is neither a table nor a paper.
    """
    known = {key: (measure, paper.KIND) for paper in PAPERS.values() for key, measure in paper.TABLES.items()}
    wanted: set[str] = set()
    for name in only or tuple(PAPERS):
        keys = set(PAPERS[name].TABLES) if name in PAPERS else {name} & set(known)
        if not keys:
            raise BenchError(f"--only {name}: no such table; there are {', '.join(known)}")
        wanted |= keys
    return {key: measure for key, measure in known.items() if key in wanted}


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
    wanted, context, path = chosen(options.only), Context(options), Path(options.out)
    entries = read_tables(path) if path.exists() else []
    before = len(entries)
    tables: list[PaperTable] = []
    left_out: dict[str, str] = {}
    for key, (measure, kind) in tqdm(wanted.items(), desc="tables", mininterval=1):
        identity = _identity(context, kind)
        alike = [entry for entry in entries if (entry["key"], entry["identity"]) == (key, identity)]
        if alike and not options.again:
            tables.append(PaperTable.model_validate(alike[-1]))
            continue
        try:
            context.heads(kind)
            tables.append(measure(context))
        except BenchError as error:
            left_out[key] = str(error)
            tqdm.write(f"left out: {key}: {error}")
            continue
        except KeyboardInterrupt:
            fresh = f"{len(entries) - before} new tables are kept in {path}"
            raise Stopped(f"stopped at {key}; {fresh}, the same command goes on there") from None
        entries.append(provenance(identity=identity, **tables[-1].model_dump(mode="json")))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"benchmark": "tables", "tables": entries}, indent=1) + "\n")
    return tables, left_out


def _identity(context: Context, kind: str) -> dict[str, Any]:
    """What a table was measured on: files by size and time of change."""
    options, folders = context.options, context.folders[kind]
    return {
        "model": options.model,
        "model_files": _stamps(sorted(Path(options.model).glob("*.safetensors"))),
        "tasks": {name: _stamps(expand([path])) for name, path in map(named, options.task)},
        "heads": [[Path(folder).name, *_stamps(sorted(Path(folder).glob("*.safetensors")))] for folder in folders],
        "options": options.essence(),
    }


def _stamps(files: list[Path]) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
