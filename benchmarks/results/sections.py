# SPDX-License-Identifier: Apache-2.0
"""What the page says of each file of results: a text, a table, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.decode import closed_loop_table, group, step_breakdown
from vllm_ppd.benchmarks.decode import table as decode_table
from vllm_ppd.benchmarks.harness.contenders import BASE
from vllm_ppd.benchmarks.harness.estimates import ALL
from vllm_ppd.benchmarks.harness.results import Measured, Row, stored
from vllm_ppd.benchmarks.papers import acceptance
from vllm_ppd.benchmarks.papers.table import PaperTable, claims, read_tables, render
from vllm_ppd.benchmarks.results.again import AGAIN
from vllm_ppd.benchmarks.results.drawing import ALONE, OURS, THEIRS, Bar, Bars, Line, Plot, bars, lines, stacks
from vllm_ppd.benchmarks.serve import open_loop_table
from vllm_ppd.benchmarks.serve import table as serve_table
from vllm_ppd.benchmarks.serve.run import load_rows
from vllm_ppd.heads.calibration.tables import table as markdown

OF_VLLM = ("ngram", "suffix", "medusa", "eagle", "eagle3", "draft_model", "mtp")


class Section(NamedTuple):
    """A file of results."""

    name: str  # of the file, without .json
    title: str
    text: str  # markdown, the table in it
    table: str  # the table alone, for a document
    plots: Sequence[Plot] = ()


Parts = tuple[str, str, Sequence[Plot]]


def all_sections(folder: Path) -> list[Section]:
    """A section for each file that is there, speeds first; files that are not known are shown as their rows."""
    # The turns behind a table are kept beside it, for a run to add to.
    files = {path.stem: path for path in sorted(folder.glob("*.json")) if not path.stem.endswith(".turns")}
    order = [*(name for name in KNOWN if name in files), *(name for name in files if name not in KNOWN)]
    found = []
    for name in order:
        title, make = KNOWN.get(name, (name.replace("_", " "), any_rows))
        found.append(Section(name, title, *make(files[name])))
    return found


def headlines(folder: Path) -> dict[str, str]:
    """Tables that are of no file as a whole, by the name that a document asks for them by."""
    known = {"decode": decode_table.headline, "acceptance": acceptance.headline}
    files = {name: folder / f"{name}.json" for name in known}
    tables = [path for path in sorted(folder.glob("tables*.json")) if not path.stem.endswith(".turns")]
    headlines = {f"{name}_headline": known[name](stored(path)) for name, path in files.items() if path.exists()}
    return headlines | {"claims": claims(tables)}


def whose(measured: Measured, name: str) -> str:
    """Which group of contenders one belongs to."""
    identity = measured.contenders[name]
    config = identity["speculative_config"]
    if config is None:
        return THEIRS if identity["engine"] else ALONE
    return THEIRS if config.get("method") in OF_VLLM else OURS


def _about(measured: Measured, what: str) -> str:
    """A plot's title: what is measured, on which model and machine."""
    options = measured.run["options"]
    return f"{what}\n{options['model']}, temperature {options['temperature']:g}; {measured.run['machine']}"


def _several(path: Path, say: Callable[[Measured], str], body: Callable[[Measured], str],
             draw: Callable[[Measured], Plot]) -> Parts:  # fmt: skip
    found = stored(path)
    texts = [
        f"`{one.run['command']}`, {one.run['time'][:10]}, commit {str(one.run['git'])[:7]}.\n\n{say(one)}"
        + ("" if one.run["finished"] else "\n\nThe newest run was stopped before its end.")
        for one in found
    ]
    tables = [body(one) if len(found) == 1 else f"{say(one).splitlines()[0]}:\n\n{body(one)}" for one in found]
    return "\n\n".join(texts), "\n\n".join(tables), [draw(one) for one in found]


def _speed_ups(measured: Measured, over: str) -> Plot:
    """Speed-ups in a panel a batch size, fastest first."""
    rows = decode_table.rows_of(measured)
    panels = [
        Bars(
            f"{size} request{'s' * (size > 1)} at once",
            [
                Bar(row["contender"], whose(measured, row["contender"]), row["speed_up"][0], row["speed_up"][1:])
                for row in rows
                if row["batch"] == size and row["contender"] != BASE
            ],
        )
        for size in dict.fromkeys(row["batch"] for row in rows)
    ]
    return bars(_about(measured, f"Speed-up over {over}"), "tokens a second / base (quartiles)", panels, 1.0)


def decode(path: Path) -> Parts:
    return _several(path, decode_table.table, decode_table.overview, lambda one: _speed_ups(one, "vLLM alone"))


def group_runs(path: Path) -> Parts:
    return _several(
        path, lambda one: group.table(one, one.run["num_layers"]),
        lambda one: group.body(one, one.run["num_layers"]), lambda one: _speed_ups(one, "vLLM's own two stages"),
    )  # fmt: skip


def serve(path: Path) -> Parts:
    def draw(one: Measured) -> Plot:
        rows = load_rows(one)
        loads = list(dict.fromkeys(row["load"] for row in rows))
        panels = [
            Bars(
                f"{name}, {load}",
                [
                    Bar(row["contender"], whose(one, row["contender"]), row[key][0], row[key][1:])
                    for row in rows
                    if row["load"] == load and row["contender"] != BASE
                ],
            )
            for key, name in (("faster_e2el", "latency"), ("faster_tpot", "TPOT"))
            for load in loads
        ]
        what = _about(one, "Servers: times as fast as vLLM alone, medians of requests and quartiles of turns")
        return bars(what, "vLLM / contender", panels, 1.0, across=min(4, len(loads)))

    return _several(path, serve_table.table, serve_table.body, draw)


def closed_loop(path: Path) -> Parts:
    ratios = {"overall": "tokens over those of vLLM alone in the same seconds"}
    return _loop(path, closed_loop_table.rows_of, closed_loop_table.LEGEND, "batch", "batch {}", ratios)


def open_loop(path: Path) -> Parts:
    ratios = {
        "engine": "seconds that vLLM alone computes for the same requests, over those with heads",
        "latency": "seconds from arrival to last token with vLLM alone, waiting included, over those with heads",
    }
    return _loop(path, open_loop_table.rows_of, open_loop_table.LEGEND, "rate", "{} a second", ratios)


def _loop(path: Path, rows_of: Callable[[Sequence[Measured]], list[Row]], legend: str, axis: str, header: str,
          ratios: dict[str, str]) -> Parts:  # fmt: skip
    """A table a ratio: a row a contender and temperature, a column a load; vLLM alone in one row, as what noise is."""
    found = stored(path)
    rows = rows_of(found)
    loads = sorted({str(row[axis]) for row in rows} - {ALL}, key=float)
    names = {load: "all at once" if load == "inf" else header.format(load) for load in loads}
    columns = [*loads, ALL]
    run = found[-1].run
    tables, plots = [], []
    for ratio, text in ratios.items():
        interval = f"{ratio}, interval"
        cells: dict[tuple[str, str], dict[str, str]] = {}
        plain: dict[str, list[float]] = {}
        panels: dict[str, list[Bar]] = {}
        for row in rows:
            load, name = str(row[axis]), row["contender"]
            if name.startswith(BASE):
                plain.setdefault(load, []).append(row[ratio])
            else:
                of_row = cells.setdefault((name, str(row["temperature"])), {})
                of_row[load] = f"{row[ratio]:.3f} ({row[interval]})"
            if str(row["temperature"]) == ALL and not name.startswith(BASE):
                low, high = map(float, row[interval].split("-"))
                panels.setdefault(load, []).append(Bar(name, OURS, row[ratio], (low, high)))
        shown = [[*key, *(of_row.get(load, "") for load in columns)] for key, of_row in sorted(cells.items())]
        shown.append(
            [f"each engine of {BASE} alone", "", *(f"{min(plain[x]):.3f}-{max(plain[x]):.3f}" for x in columns)]
        )
        title = f"{text[0].upper()}{text[1:]} (interval at 90 %); {ALL}: of several cells, geometric mean."
        tables.append(f"{title}\n\n{markdown(['heads', 'temperature', *names.values(), ALL], shown)}")
        about = f"{text[0].upper()}{text[1:]}, all temperatures\n{run['options']['model']}; {run['machine']}"
        drawn = [
            Bars(names.get(load, ALL), [*own, Bar(ALONE, ALONE, 1.0, (min(plain[load]), max(plain[load])))])
            for load, own in ((load, panels[load]) for load in columns if load in panels)
        ]
        plots.append(bars(about, "interval at 90 %; vLLM: its engines", drawn, 1.0, across=3))
    table = "\n\n".join(tables)
    source = _source({"model": run["options"]["model"], **run}, AGAIN[path.stem])
    return f"{source}\n\n{table}\n\n{legend}\n\nEvery pair or request: [{path.name}]({path.name}).", table, plots


def _source(data: dict[str, Any], again: str | None = None) -> str:
    """Where a file comes from, and the command that measures it again."""
    what = [data[key] for key in ("model", "machine") if key in data]
    facts = [*what, data["time"][:10], f"commit {str(data['git'])[:7]}"]
    return f"{', '.join(facts)}: `{again or data['command']}`"


def breakdown(path: Path) -> Parts:
    data = json.loads(path.read_text())
    rows = data["rows"]
    shown = step_breakdown.table(rows)
    names = dict.fromkeys(name for row in rows for name in row["parts_in_passes"])
    names = dict.fromkeys(sorted(names, key=lambda name: name.startswith("rest of")))
    parts: dict[str, Sequence[float]] = {
        name: [max(0.0, row["parts_in_passes"].get(name, 0.0)) for row in rows] for name in names
    }
    labels = [f"{row['method']}, batch {row['batch']}" for row in rows]
    plot = stacks(f"A step that verifies and drafts\n{data['model']}; {data['machine']}", "full passes", labels, parts)
    return f"{_source(data, AGAIN[path.stem])}\n\n{shown}", shown, [plot]


def paper_tables(path: Path) -> Parts:
    """The papers' tables; the newest of each counts."""
    newest = {entry["key"]: entry for entry in read_tables(path)}
    tables = [PaperTable.model_validate(entry) for entry in newest.values()]
    shown = "\n\n".join(map(render, tables))
    drawn = [
        _figure(table, f"ours: {entry['identity']['model']}; {entry['machine']}")
        for table, entry in zip(tables, newest.values(), strict=True)
        if table.axes is not None and any(_curves(table))
    ]
    return shown, shown, drawn


def acceptances(path: Path) -> Parts:
    found = stored(path)
    shown = acceptance.report(found)
    return f"{_source({'model': found[-1].run['options']['model'], **found[-1].run})}\n\n{shown}", shown, []


def _curves(table: PaperTable) -> Iterable[Line]:
    for curve in table.curves:
        for points, published in ((curve.ours, False), (curve.theirs, True)):
            if points:
                x, y = zip(*points, strict=True)
                yield Line(curve.label, x, y, published)


def _figure(table: PaperTable, ours: str) -> Plot:
    x_label, y_label = table.axes or ("", "")
    return lines(f"{table.paper}, {table.title}\n{ours}", x_label, y_label, list(_curves(table)))


def any_rows(path: Path) -> Parts:
    """Any other file: its rows as they are, or that it has none."""
    data = json.loads(path.read_text())
    rows = data.get("rows")
    if not rows:
        return f"[{path.name}]({path.name})", "", []
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = markdown(columns, [[row.get(name, "") for name in columns] for row in rows])
    return f"{_source(data, AGAIN.get(path.stem))}\n\n{shown}" if "command" in data else shown, shown, []


KNOWN: dict[str, tuple[str, Callable[[Path], Parts]]] = {
    "decode": ("Offline decoding", decode),
    "smollm_decode": ("Offline decoding of SmolLM2", decode),
    "gpu_decode": ("Offline decoding on a GPU", decode),
    "closed_loop": ("Never slower: batches", closed_loop),
    "open_loop": ("Never slower: requests that arrive", open_loop),
    "serve": ("Servers under load", serve),
    "soak": ("Ten thousand requests to a server", any_rows),
    "plan_check": ("What steps with drafts cost, and what `ppd plan` predicts", any_rows),
    "group": ("The worker group", group_runs),
    "group_cut_off": ("The worker group above its cut-off", decode),
    "acceptance": ("Spec-Bench: equal output, and accepted drafts", acceptances),
    "gpu_acceptance": ("Spec-Bench on a GPU: equal output", acceptances),
    "cp_conditions": ("Spec-Bench: what a CP head reads beside the state", acceptances),
    "tables": ("The papers' tables", paper_tables),
    "tables_smollm": ("The papers' tables on SmolLM2-135M-Instruct", paper_tables),
    "cp_from_scratch": ("CP heads with a base model from scratch", any_rows),
    "cp_balance": ("CP heads with a base model from scratch, by weight of the balance loss", any_rows),
    "cp_jointly": ("CP heads trained jointly with a base model", any_rows),
    "step_breakdown_early": ("What a step of early drafting costs", breakdown),
    "step_breakdown_heads": ("What drafting with CP and DynaMo heads costs", breakdown),
}
