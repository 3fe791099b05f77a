# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a file of results, by the file's schema: text with tables, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.decode import table as decode_table
from vllm_ppd.benchmarks.harness.contenders import BASE
from vllm_ppd.benchmarks.harness.results import Measured, Row, stored
from vllm_ppd.benchmarks.papers import acceptance
from vllm_ppd.benchmarks.papers.table import PaperTable, claims, read_tables, render
from vllm_ppd.benchmarks.results.drawing import ALONE, OURS, THEIRS, Bar, Bars, Line, Plot, bars, lines
from vllm_ppd.benchmarks.serve import table as serve_table
from vllm_ppd.heads.in_words import table as markdown

OF_VLLM = ("ngram", "suffix", "medusa", "eagle", "eagle3", "draft_model", "mtp")
Content = tuple[str, list[Plot]]


class Section(NamedTuple):
    """A file of results on the page."""

    title: str
    note: str
    text: str  # markdown
    plots: dict[str, Plot]  # by path under the folder of results


def all_sections(folder: Path) -> list[Section]:
    """A section a JSON file of the folder, in the order of SCHEMAS; without a NAME.md its name is the title."""
    files = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    order = list(SCHEMAS)
    files.sort(key=lambda file: order.index(_schema(file[1])))
    return [_section(path, data) for path, data in files]


def _schema(data: dict[str, Any]) -> str:
    name = data.get("benchmark")
    return name if name in SCHEMAS else "rows"


def _section(path: Path, data: dict[str, Any]) -> Section:
    about = path.with_suffix(".md")
    title, _, note = about.read_text().partition("\n") if about.exists() else (path.stem.replace("_", " "), "", "")
    text, plots = SCHEMAS[_schema(data)](path, data)
    names = [path.stem + (f"-{number}" if len(plots) > 1 else "") for number in range(1, len(plots) + 1)]
    by_path = {f"plots/{name}.svg": plot for name, plot in zip(names, plots, strict=True)}
    return Section(title.removeprefix("# "), note.strip(), text, by_path)


def headlines(folder: Path) -> dict[str, str]:
    """Tables of documents, by the name that these ask for them by."""
    path = folder / "acceptance.json"
    accepted = {"acceptance_headline": acceptance.headline(stored(path))} if path.exists() else {}
    return accepted | {"claims": claims(sorted(folder.glob("tables*.json")))}


def _source(run: dict[str, Any]) -> str:
    """Which command measured a run, when and at which commit."""
    return f"`{run['command']}`, {run['time'][:10]}, commit {str(run['git'])[:7]}"


def decode(path: Path, data: dict[str, Any]) -> Content:
    def draw(measured: Measured) -> Plot:
        rows = decode_table.rows_of(measured)
        sizes = dict.fromkeys(row["batch"] for row in rows)
        panels = [
            _bars(measured, f"{size} request{'s' * (size > 1)} at once", rows, "speed_up", batch=size) for size in sizes
        ]
        title = _about(measured, "Speed-up over vLLM without speculation")
        return bars(title, "tokens a second / base (quartiles)", panels)

    return _runs(path, decode_table.body, decode_table.LEGEND, draw)


def serve(path: Path, data: dict[str, Any]) -> Content:
    def draw(measured: Measured) -> Plot:
        rows = serve_table.rows_of(measured)
        loads = list(dict.fromkeys(row["load"] for row in rows))
        panels = [
            _bars(measured, f"{name}, {load}", rows, key, load=load)
            for key, name in (("faster_e2el", "latency"), ("faster_tpot", "TPOT"))
            for load in loads
        ]
        title = _about(measured, "Servers: times as fast as vLLM alone, medians of requests and quartiles of turns")
        return bars(title, "vLLM / contender", panels, across=min(4, len(loads)))

    return _runs(path, serve_table.body, serve_table.LEGEND, draw)


def _runs(path: Path, body: Callable[[Measured], str], legend: str, draw: Callable[[Measured], Plot]) -> Content:
    everything = stored(path)
    texts = [
        f"{_source(measured.run)}.\n\n{body(measured)}"
        + ("" if measured.run["finished"] else "\n\nThe newest run was stopped before its end.")
        for measured in everything
    ]
    return "\n\n".join([*texts, legend]), [draw(measured) for measured in everything]


def _about(measured: Measured, what: str) -> str:
    """A plot's title: what is measured, on which model and machine."""
    options = measured.run["options"]
    return f"{what}\n{options['model']}, temperature {options['temperature']:g}; {measured.run['machine']}"


def _bars(measured: Measured, title: str, rows: list[Row], key: str, **place: Any) -> Bars:
    """A panel of the contenders' ratios to the base at a load."""
    chosen = [row for row in rows if place.items() <= row.items() and row["contender"] != BASE]
    return Bars(
        title, [Bar(row["contender"], _whose(measured, row["contender"]), row[key][0], row[key][1:]) for row in chosen]
    )


def _whose(measured: Measured, name: str) -> str:
    """Which group of contenders a contender belongs to."""
    identity = measured.contenders[name]
    config = identity["speculative_config"]
    if config is None:
        return THEIRS if identity["engine"] else ALONE
    return THEIRS if config.get("method") in OF_VLLM else OURS


def acceptances(path: Path, data: dict[str, Any]) -> Content:
    everything = stored(path)
    return f"{_source(everything[-1].run)}.\n\n{acceptance.report(everything)}", []


def paper_tables(path: Path, data: dict[str, Any]) -> Content:
    """The papers' tables; the newest of each counts."""
    newest = {entry["key"]: entry for entry in read_tables(path)}
    tables = {key: PaperTable.model_validate(entry) for key, entry in newest.items()}
    plots = []
    for key, table in tables.items():
        if table.axes is not None and (curves := list(_curves(table))):
            entry = newest[key]
            title = f"{table.paper}, {table.title}\nours: {entry['identity']['model']}; {entry['machine']}"
            plots.append(lines(title, *table.axes, curves))
    return "\n\n".join(map(render, tables.values())), plots


def _curves(table: PaperTable) -> Iterable[Line]:
    for curve in table.curves:
        for points, published in ((curve.ours, False), (curve.theirs, True)):
            if points:
                x, y = zip(*points, strict=True)
                yield Line(curve.label, x, y, published)


def rows(path: Path, data: dict[str, Any]) -> Content:
    """Any other file: its rows as they are."""
    every = data.get("rows", [])
    columns = list(dict.fromkeys(name for row in every for name in row))
    table = markdown(columns, [[row.get(name, "") for name in columns] for row in every])
    facts = [data[key] for key in ("model", "machine") if key in data]
    return f"{', '.join([*facts, _source(data)])}.\n\n{table}" if "command" in data else table, []


# By what a file has under "benchmark".
SCHEMAS: dict[str, Callable[[Path, dict[str, Any]], Content]] = {
    "decode": decode,
    "serve": serve,
    "acceptance": acceptances,
    "rows": rows,
    "tables": paper_tables,
}
