# SPDX-License-Identifier: Apache-2.0
"""What the page says of each file of results: a text, a table, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plots import Line, Panel, Plot, bars, panels, stacks

from vllm_ppd.heads.calibration.tables import table as markdown
from vllm_ppd.vllm_plugins.bench import group, serve_table, table
from vllm_ppd.vllm_plugins.bench.results import Measured, Row, stored
from vllm_ppd.vllm_plugins.bench.serve import load_rows
from vllm_ppd.vllm_plugins.bench.serve_options import Load


class Section(NamedTuple):
    """A file of results."""

    name: str  # of the file, without .json
    title: str
    text: str  # markdown, the table in it
    table: str  # the table alone, for the README
    plots: Sequence[Plot] = ()


def all_sections(folder: Path) -> list[Section]:
    """A section for each file that is there, speeds first; files that are not known are shown as their rows."""
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    order = [*(name for name in KNOWN if name in files), *(name for name in files if name not in KNOWN)]
    found = []
    for name in order:
        title, make = KNOWN.get(name, (name.replace("_", " "), _rows))
        found.append(Section(name, title, *make(files[name])))
    return found


Parts = tuple[str, str, Sequence[Plot]]


def _source(data: dict[str, Any]) -> str:
    """Where a file comes from."""
    what = [data["model"]] if "model" in data else []
    facts = [*what, data.get("machine", "two cores"), data["time"][:10], f"commit {str(data['git'])[:7]}"]
    return f"{', '.join(facts)}: `{data['command']}`"


# ---- files of turns


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


def _decode(path: Path) -> Parts:
    def draw(one: Measured) -> Plot:
        return panels([
            Panel("tokens a second / vLLM alone (quartiles)", "requests decoded together",
                  _by_contender(one.rows(), "batch", "speed_up"), level=1.0),
            Panel("tokens a second", "requests decoded together",
                  _by_contender(one.rows(), "batch", "tokens_per_second")),
        ])  # fmt: skip

    return _several(path, table.table, table.body, draw)


def _by_contender(rows: list[Row], x: str, y: str) -> list[Line]:
    names = dict.fromkeys(row["contender"] for row in rows)
    own = {name: [row for row in rows if row["contender"] == name] for name in names}
    return [
        Line(name, [row[x] for row in found], [row[y][0] for row in found], [row[y][1:] for row in found])
        for name, found in own.items()
    ]


def _group(path: Path) -> Parts:
    def draw(one: Measured) -> Plot:
        level = "tokens a second / vLLM's own two stages (quartiles)"
        return panels([Panel(level, "requests", _by_contender(one.rows(), "batch", "speed_up"), level=1.0)])

    return _several(
        path, lambda one: group.table(one, one.run["num_layers"]),
        lambda one: group.body(one, one.run["num_layers"]), draw,
    )  # fmt: skip


def _serve(path: Path) -> Parts:
    return _several(path, serve_table.table, serve_table.body, _serve_plot)


def _serve_plot(one: Measured) -> Plot:
    rows = load_rows(one)
    loads: list[Load] = list(dict.fromkeys(row["load"] for row in rows))
    ticks = [str(load) for load in loads]

    def lines(value: Callable[[Row], tuple[float, float, float] | float | None]) -> list[Line]:
        found = []
        for name in dict.fromkeys(row["contender"] for row in rows):
            for at_once in (False, True):  # rates and numbers at once are axes of their own
                own = [
                    row for row in rows
                    if row["contender"] == name and (row["load"].concurrency is not None) == at_once
                ]  # fmt: skip
                points = [(loads.index(row["load"]), y) for row in own if (y := value(row)) is not None]
                middles = [y[0] if isinstance(y, tuple) else y for _, y in points]
                ranges = [y[1:] for _, y in points if isinstance(y, tuple)]
                if points:
                    found.append(Line(name, [x for x, _ in points], middles, ranges))
        return found

    return panels([
        Panel("TTFT, ms, median of requests", "", lines(lambda row: row["ttft"][0]), ticks, log=True),
        Panel("TPOT, ms, median of requests", "", lines(lambda row: row["tpot"][0]), ticks),
        Panel("ITL, ms, median of messages", "", lines(lambda row: row["itl"][0]), ticks),
        Panel("tokens a second", "", lines(lambda row: row["tokens_per_second"]), ticks),
        Panel("TPOT: times as fast as vLLM alone (quartiles)", "", lines(lambda row: row["faster_tpot"]), ticks,
              level=1.0),
        Panel("latency: times as fast as vLLM alone (quartiles)", "", lines(lambda row: row["faster_e2el"]), ticks,
              level=1.0),
        Panel("accepted drafts / drafts made", "", lines(lambda row: row["rate"]), ticks),
        Panel("prefix-cache hits / tokens of prompts", "", lines(lambda row: row["prefix_hits"]), ticks),
    ])  # fmt: skip


# ---- files of rows


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = json.loads(path.read_text())
    return data, data["rows"]


def _cycle_cost(path: Path) -> Parts:
    data, rows = _read(path)
    header = ("batch", "full pass (quartiles)", "cycle (quartiles)", "cycle / pass", "formula", "ratio")
    cells = [
        [row["batch"], *(_spread(row[f"{what}_ms"], row[f"{what}_ms_quartiles"]) for what in ("full_pass", "cycle")),
         row["cycle_in_passes"], row["formula"], row["ratio"]]
        for row in rows
    ]  # fmt: skip
    shown = _plain(header, cells)
    note = "A full pass is vLLM's own step; formula: n l/L + 1 passes, the limit where memory bandwidth is one."
    plot = _stacked([f"batch {row['batch']}" for row in rows], rows)
    return f"{_source(data)}\n\n{shown}\n\n{note}", shown, [plot]


def _draft_cost(path: Path) -> Parts:
    data, rows = _read(path)
    columns = {
        "transforms": "transforms of the experts", "heads' layers": "heads' layers in the forward",
        "LM head": "one read of the LM head",
        "mixture / joint": ("softmax, mixtures, arg-max", "joint, thresholds, back-off"),
        "drafting, whole": "drafting, whole",
    }  # fmt: skip
    cells = []
    for row in rows:
        parts = {name.strip(): value for name, value in row["parts_in_passes"].items()}
        found = [_first(parts, (names,) if isinstance(names, str) else names) for names in columns.values()]
        name = row["method"] if "vocabulary" in row["method"] else (
            f"{row['method']}, {data['settings']['draft_vocab']} tokens"
        )  # fmt: skip
        whole = parts["drafting, whole"] + parts.get("heads' layers in the forward", 0.0)
        cells.append([name, *("" if value is None else f"{value:.4f}" for value in found), f"{whole:.3f}"])
    shown = _plain(["heads", *columns, "with layers"], cells, "---")
    settings = data["settings"]
    note = (
        f"In units of a full pass of {rows[0]['full_pass_ms']} ms, batch {rows[0]['batch']}; CP rank "
        f"{settings['rank']} with {settings['drafts']} drafts, DynaMo T{settings['tokens']}."
    )
    details = [{**row, "parts_in_passes": {name: value for name, value in row["parts_in_passes"].items()
                                           if name != "drafting, whole"}} for row in rows]  # fmt: skip
    return f"{_source(data)}\n\n{shown}\n\n{note}", shown, [_stacked([row[0] for row in cells], details)]


def _first(parts: dict[str, float], names: Sequence[str]) -> float | None:
    return next((parts[name] for name in names if name in parts), None)


def _stacked(labels: list[str], rows: list[dict[str, Any]]) -> Plot:
    names = dict.fromkeys(name for row in rows for name in row["parts_in_passes"])
    parts = {name.strip(): [row["parts_in_passes"].get(name, 0.0) for row in rows] for name in names}
    return stacks(labels, parts, "full passes")


def _demo_acceptance(path: Path) -> Parts:
    data, rows = _read(path)
    header = ("method", "setting", "drafted a step", "accepted a step", "rate", "length", "repeated 4-grams")
    shown = markdown(header, [[row[name] for name in header] for row in rows])
    settings = sorted({row["setting"] for row in rows}, reverse=True)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lengths = {(row["method"], row["setting"]): row["length"] for row in rows}
    plot = bars(
        methods, {name: [lengths.get((method, name), 0.0) for method in methods] for name in settings},
        "acceptance length: 1 + accepted / drafts",
    )  # fmt: skip
    return f"{_source(data)}\n\n{shown}", shown, [plot]


def _ablation(path: Path) -> Parts:
    data, rows = _read(path)
    shown = markdown(list(rows[0]), [["" if value is None else value for value in row.values()] for row in rows])
    names = list(rows[0])
    schedule, heads, gamma, ratio = names[:4]
    curves = dict.fromkeys((row[schedule], row[heads]) for row in rows)
    lines = [
        Line(f"{curve[0]}, heads: {curve[1]}", [row[gamma] for row in own], [row[ratio] for row in own])
        for curve in curves
        for own in [[row for row in rows if (row[schedule], row[heads]) == curve]]
    ]
    return f"{_source(data)}\n\n{shown}", shown, [panels([Panel(ratio, gamma, lines, level=1.0)])]


def _tables(path: Path) -> Parts:
    """The papers' tables; the newest of each counts."""
    from vllm_ppd.vllm_plugins.bench.tables import PaperTable
    from vllm_ppd.vllm_plugins.bench.tables.render import render

    newest = {entry["key"]: entry for entry in json.loads(path.read_text())["tables"]}
    found = [PaperTable.from_json(entry) for entry in newest.values()]
    shown = "\n\n".join(map(render, found))
    drawn = []
    for one in found:
        lines = [
            Line(f"{curve.label}, {whose}", *zip(*points, strict=True))
            for curve in one.curves
            for whose, points in (("ours", curve.ours), ("paper", curve.theirs))
            if points
        ]
        if one.axes is not None and lines:
            drawn.append(panels([Panel(f"{one.paper}, {one.title}: {one.axes[1]}", one.axes[0], lines)]))
    return shown, shown, drawn


def _rows(path: Path) -> Parts:
    """Any other file: its rows as they are, or that it has none."""
    data = json.loads(path.read_text())
    rows = data.get("rows")
    if not rows:
        return f"[{path.name}]({path.name})", "", []
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = markdown(columns, [[row.get(name, "") for name in columns] for row in rows])
    return f"{_source(data)}\n\n{shown}" if "command" in data else shown, shown, []


def _plain(header: Sequence[str], cells: list[list[Any]], first: str = "---:") -> str:
    lines = [f"| {' | '.join(header)} |", f"| {first} |{' ---: |' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in cells)])


def _spread(middle: float, quartiles: Sequence[float]) -> str:
    return f"{middle:g} ms ({quartiles[0]:.2f}-{quartiles[1]:.2f})"


KNOWN: dict[str, tuple[str, Callable[[Path], Parts]]] = {
    "serve": ("Servers under load", _serve),
    "fleet_check": ("The fleets of `ppd plan`, held against servers", _rows),
    "decode": ("Offline decoding", _decode),
    "group": ("The worker group", _group),
    "tables": ("The papers' tables", _tables),
    "paradecode_ablation": ("ParaDecode's ablations", _ablation),
    "demo_acceptance": ("Acceptance of the demo model's heads", _demo_acceptance),
    "cycle_cost": ("What a cycle costs", _cycle_cost),
    "draft_cost": ("What drafting with heads costs", _draft_cost),
}
