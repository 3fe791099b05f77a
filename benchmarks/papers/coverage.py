# SPDX-License-Identifier: Apache-2.0
"""What of each paper is measured, implemented or left out, and why: writes docs/papers.md from coverage.json.

    python -m vllm_ppd.benchmarks.papers.coverage

Claims are those that the kept results of `ppd bench tables` speak of, benchmarks/results/tables*.json.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vllm_ppd.benchmarks.papers import VERDICTS, PaperTable
from vllm_ppd.benchmarks.papers.run import PAPERS
from vllm_ppd.heads.calibration.tables import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "papers.md"
STATES = ("measured", "implemented", "setting", "left out")
INTRODUCTION = """\
# The four papers

Made by `python -m vllm_ppd.benchmarks.papers.coverage`. Every table, figure, algorithm, equation and setting of the
four papers is measured (`ppd bench tables --only KEY`), implemented (where), a setting (with our default), or left out
(why)."""


def items() -> dict[str, dict[str, Any]]:
    """By paper: its title, and [where, what, state, reference] of each item."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("coverage.json").read_text())
    return found


def cell(state: str, reference: str) -> str:
    """What the page says of a reference.

    Raises:
        KeyError: if there is no such table, name or field.
    """
    if state == "measured":
        if not any(reference in paper.TABLES for paper in PAPERS.values()):
            raise KeyError(reference)
        return f"`{reference}`"
    if state == "implemented":
        folder, _, name = reference.partition(":")
        files = sorted((ROOT / folder.replace(".", "/")).glob("*.py"))
        path = next((file for file in files if name in _defined(file)), None)
        if path is None:
            raise KeyError(reference)
        return f"`{path.relative_to(ROOT)}`, `{name}`"
    if state == "setting":
        place, _, field = reference.rpartition(".")
        default = resolve_name(f"vllm_ppd.{place}").model_fields[field].default
        shown = default if isinstance(default, str) else json.dumps(default)
        return f"`{field}`, default {shown}"
    return reference


def _defined(path: Path) -> set[str]:
    """Classes and functions of a file."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def claims() -> Iterator[tuple[str, str, list[str]]]:
    """Of the newest of each table and model: the paper, the model, and the row."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("tables*.json")):
        if path.stem.endswith(".turns"):
            continue
        newest = {(e["key"], e["identity"]["model"]): e for e in json.loads(path.read_text())["tables"]}
        for (key, model), entry in newest.items():
            found = PaperTable.from_json(entry)
            for one in found.claims:
                yield found.paper, model, [f"`{key}`", one.claim, VERDICTS[one.holds], one.evidence]


def page() -> str:
    """The whole text."""
    parts = [INTRODUCTION]
    rows = [
        [paper["title"], *(Counter(item[2] for item in paper["items"])[state] for state in STATES)]
        for paper in items().values()
    ]
    parts.append(table(["paper", *STATES], rows))
    for paper in items().values():
        shown = [[where, what, state, cell(state, reference)] for where, what, state, reference in paper["items"]]
        parts += [f"## {paper['title']}", table(["where", "what", "state", "here"], shown)]
    by_model: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for title, model, (key, *claim, evidence) in claims():
        by_model.setdefault(model, {}).setdefault((title, key, *claim), []).append(evidence)
    for model, own in by_model.items():
        found = [[*claim, "; ".join(evidence)] for claim, evidence in own.items()]
        parts += [f"## The papers' claims on `{model}`", table(["paper", "table", "claim", "here", "measured"], found)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
