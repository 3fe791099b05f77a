# SPDX-License-Identifier: Apache-2.0
"""What the page says of each file of results: a text, a table, and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import row_files
from plots import Line, Panel, Plot, panels
from row_files import Parts

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
    # The turns behind a table are kept beside it, for a run to add to.
    files = {path.stem: path for path in sorted(folder.glob("*.json")) if not path.stem.endswith(".turns")}
    order = [*(name for name in KNOWN if name in files), *(name for name in files if name not in KNOWN)]
    found = []
    for name in order:
        title, make = KNOWN.get(name, (name.replace("_", " "), row_files.anything))
        found.append(Section(name, title, *make(files[name])))
    return found


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

    return _several(path, table.table, table.overview, draw)


def _by_contender(rows: list[Row], x: str, y: str) -> list[Line]:
    names = dict.fromkeys(row["contender"] for row in rows)
    own = {name: [row for row in rows if row["contender"] == name] for name in names}
    return [
        Line(name, [row[x] for row in found], [row[y][0] for row in found], [row[y][1:] for row in found])
        for name, found in own.items()
    ]


def headlines(folder: Path) -> dict[str, str]:
    """Tables that are of no file as a whole, by the name that a document asks for them by."""
    path = folder / "decode.json"
    return {"decode_headline": _one_at_a_time(stored(path))} if path.exists() else {}


def _one_at_a_time(found: list[Measured]) -> str:
    """Speed-ups at batch 1: a row a contender, a column a temperature."""
    cells: dict[str, dict[str, str]] = {}
    for one in found:
        temperature = f"temperature {one.run['options']['temperature']:g}"
        for row in one.rows():
            if row["batch"] == 1:
                cells.setdefault(row["contender"], {})[temperature] = table.with_quartiles(row["speed_up"], 2)
    columns = list(dict.fromkeys(name for own in cells.values() for name in own))
    return table.rows_of(
        ["batch 1", *columns],
        "---",
        [[name, *(own.get(column, "-") for column in columns)] for name, own in cells.items()],
    )


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


KNOWN: dict[str, tuple[str, Callable[[Path], Parts]]] = {
    "serve": ("Servers under load", _serve),
    "fleet_check": ("The fleets of `ppd plan`, held against servers", row_files.anything),
    "decode": ("Offline decoding", _decode),
    "prediction": ("What `ppd plan` predicts, and what was measured", row_files.anything),
    "step_prediction": ("What steps with drafts cost, and what is predicted", row_files.anything),
    "never_slower": ("Never slower: batches", row_files.never_slower),
    "arrivals": ("Never slower: requests that arrive", row_files.arrivals),
    "price_error": ("How far off an engine's idea of what its drafts cost is", row_files.anything),
    "group": ("The worker group", _group),
    "group_cut_off": ("The worker group above its cut-off", _decode),
    "tables": ("The papers' tables", row_files.paper_tables),
    "paradecode_ablation": ("ParaDecode's ablations", row_files.ablation),
    "demo_acceptance": ("Acceptance of the demo model's heads", row_files.demo_acceptance),
    "cycle_cost": ("What a cycle costs", row_files.cycle_cost),
    "draft_cost": ("What drafting with heads costs", row_files.draft_cost),
}
