# SPDX-License-Identifier: Apache-2.0
"""Files of results that hold rows: a text with where they come from, the table alone, and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plots import Line, Panel, Plot, bars, panels, stacks

from vllm_ppd.heads.calibration.tables import table as markdown
from vllm_ppd.vllm_plugins.bench.contenders import BASE

Parts = tuple[str, str, Sequence[Plot]]
ALL = "all"


def _source(data: dict[str, Any]) -> str:
    """Where a file comes from."""
    what = [data[key] for key in ("model", "machine") if key in data]
    facts = [*what, data["time"][:10], f"commit {str(data['git'])[:7]}"]
    return f"{', '.join(facts)}: `{data['command']}`"


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = json.loads(path.read_text())
    return data, data["rows"]


def cycle_cost(path: Path) -> Parts:
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


def draft_cost(path: Path) -> Parts:
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


def demo_acceptance(path: Path) -> Parts:
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


def ablation(path: Path) -> Parts:
    from paradecode_ablation import FIGURE_6, stored

    run, rows = stored(path)
    shown = markdown(list(rows[0]), [list(row.values()) for row in rows])
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        without = "" if row["verified"] == "yes" else ", not verified"
        curves.setdefault(f"{row['schedule']}, T {row['T']}{without}", []).append(row)
    lines = [
        Line(name, [row["gamma"] for row in own], [row["speed-up"] for row in own]) for name, own in curves.items()
    ]
    text = f"{_source(run)}\n\n{shown}\n\n{FIGURE_6}"
    return text, shown, [panels([Panel("speed-up over vLLM alone", "gamma", lines, level=1.0)])]


def paper_tables(path: Path) -> Parts:
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


def never_slower(path: Path) -> Parts:
    return _by_load(path, "batch", "batch {}", {"overall": "tokens over those of vLLM alone in the same seconds"})


def arrivals(path: Path) -> Parts:
    ratios = {
        "engine": "seconds that vLLM alone computes for the same requests, over those with heads",
        "latency": "seconds from arrival to last token with vLLM alone, waiting included, over those with heads",
    }
    return _by_load(path, "rate", "{} a second", ratios)


def _by_load(path: Path, axis: str, header: str, ratios: dict[str, str]) -> Parts:
    """A table a ratio: a row a contender and temperature, a column a load; vLLM alone in one row, as what noise is."""
    data, rows = _read(path)
    loads = sorted({str(row[axis]) for row in rows} - {ALL}, key=float)
    names = {load: "all at once" if load == "inf" else header.format(load) for load in loads}
    tables = []
    for ratio, text in ratios.items():
        interval = f"{ratio}, interval" if f"{ratio}, interval" in rows[0] else "interval"
        cells: dict[tuple[str, str], dict[str, str]] = {}
        plain: dict[str, list[float]] = {}
        for row in rows:
            load = str(row[axis])
            if row["contender"].startswith(BASE):
                plain.setdefault(load, []).append(row[ratio])
                continue
            of_row = cells.setdefault((row["contender"], str(row["temperature"])), {})
            of_row[load] = f"{row[ratio]:.3f} ({row[interval]})"
        columns = [*loads, ALL]
        shown = [[*key, *(of_row.get(load, "") for load in columns)] for key, of_row in sorted(cells.items())]
        shown.append(
            [f"each engine of {BASE} alone", "", *(f"{min(plain[x]):.3f}-{max(plain[x]):.3f}" for x in columns)]
        )
        title = f"{text[0].upper()}{text[1:]} (interval at 90 %); {ALL}: of several cells, geometric mean."
        tables.append(f"{title}\n\n{markdown(['heads', 'temperature', *names.values(), ALL], shown)}")
    table = "\n\n".join(tables)
    return f"{_source(data)}\n\n{table}\n\nEvery cell: [{path.name}]({path.name}).", table, []


def anything(path: Path) -> Parts:
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
