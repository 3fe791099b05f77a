# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the documentation, from the newest run of each file of results."""

from collections.abc import Callable
from pathlib import Path

from vllm_ppd.benchmarks.acceptance import run as acceptance
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.estimates import number, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, stored
from vllm_ppd.benchmarks.results import outdated
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.svg import Value, bars, lines

THEOREM = "Theorem 4.1"
TEMPERATURES = (0.0, 0.6)  # of the speeds in README; the results page has them all


def tables(folder: Path) -> dict[str, str]:
    """Markdown tables by the names that documents use, from the existing files of results."""
    made = {
        "acceptance_headline": ("acceptance", acceptance.headline), "speed_headline": ("smollm_decode", speeds),
        "gpu_headline": ("gpu_decode", speeds), "group_headline": ("group", group),
    }  # fmt: skip
    return {
        name: f"{make(stored(folder / f'{file}.json'))}\n\n{source(folder / f'{file}.json')}"
        for name, (file, make) in made.items() if (folder / f"{file}.json").exists()
    }  # fmt: skip


def source(path: Path) -> str:
    """A line with the source of a table."""
    run = max((measured.run for measured in stored(path)), key=lambda run: str(run["time"]))
    age = ", **older than the code**" if path.stem in outdated.known(path.parent) else ""
    return (
        f"`{path.name}`: {run['options']['dtype']}, {run['machine']}, {run['time'][:10]}, commit {run['git'][:7]}{age}."
    )


def speeds(runs: list[Measured]) -> str:
    """Speed-ups over vLLM alone: a row per contender, a column per temperature of TEMPERATURES and batch."""
    cells: dict[str, dict[str, str]] = {}
    for measured in (m for m in runs if m.run["options"]["temperature"] in TEMPERATURES):
        temperature, top_p = measured.run["options"]["temperature"], measured.run["options"].get("top_p", 1)
        sampling = f"T {temperature:g}" + f", top-p {top_p:g}" * (top_p < 1) if temperature else "greedy"
        for row in rows_of(measured):
            if row["contender"] != BASE:
                of_contender = cells.setdefault(row["contender"], {})
                of_contender[f"{sampling}, batch {row['batch']}"] = with_quartiles(row["speed_up"], 2)
                of_contender.setdefault("memory MB", f"{row['peak_bytes'] / 1e6:.0f}")
    columns = sorted({column for row in cells.values() for column in row}, key=_order(cells))
    names = sorted(cells, key=lambda name: name != CONTROL)  # the noise first
    return table(["speed-up", *columns], [[name, *(cells[name].get(c, "-") for c in columns)] for name in names])


def _order(cells: dict[str, dict[str, str]]) -> Callable[[str], tuple[bool, int]]:
    """A sort key that keeps the order of columns, with memory last."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    return lambda column: (column == "memory MB", columns.index(column))


def group(runs: list[Measured]) -> str:
    """Speed-ups of worker groups over the same two stages, beside those of the theorem."""
    rows = [row for row in rows_of(newest(runs)) if row["contender"] != BASE]
    lines = [[r["contender"], with_quartiles(r["speed_up"], 2), number(r["predicted"], "{:.2f}")] for r in rows]
    return table(["speed-up over two stages", "measured", THEOREM], lines)


def newest(runs: list[Measured]) -> Measured:
    """The newest greedy run."""
    return max((m for m in runs if m.run["options"]["temperature"] == 0), key=lambda m: str(m.run["time"]))


def plots(folder: Path) -> dict[str, str]:
    """SVG charts by file name, from the existing files of results."""
    made = {
        "acceptance": ("acceptance", positions), "speeds": ("smollm_decode", speed_bars),
        "gpu_speeds": ("gpu_decode", speed_bars), "steps": ("smollm_decode", step_bars),
        "group": ("group", group_lines),
    }  # fmt: skip
    drawn = {
        f"{name}.svg": draw(stored(folder / f"{file}.json"))
        for name, (file, draw) in made.items() if (folder / f"{file}.json").exists()
    }  # fmt: skip
    return {name: svg for name, svg in drawn.items() if svg}


def positions(runs: list[Measured]) -> str:
    greedy = (measured for measured in runs if measured.run["options"]["temperature"] == 0)
    series = {name: rates for measured in greedy for name, rates in acceptance.by_position(measured).items()}
    return lines("Drafts accepted at least up to a position, greedy", series, "position of the draft") if series else ""


def speed_bars(runs: list[Measured]) -> str:
    groups: dict[str, dict[str, Value]] = {}
    for row in rows_of(newest(runs)):
        if row["contender"] not in (BASE, CONTROL):
            groups.setdefault(f"batch {row['batch']}", {})[row["contender"]] = tuple(row["speed_up"])
    return bars("Speed-up over vLLM alone, greedy (median, quartiles)", groups, reference=1.0)


def step_bars(runs: list[Measured]) -> str:
    rows = [row for row in rows_of(newest(runs)) if row["batch"] == 1 and row["contender"] != CONTROL]
    parts = ("target's pass", "drafting", "host")
    split: dict[str, dict[str, Value]] = {
        row["contender"]: dict(zip(parts, row["split_ms"], strict=True)) for row in rows
    }
    return bars("Milliseconds of a step at batch 1, greedy", split, stacked=True)


def group_lines(runs: list[Measured]) -> str:
    rows = {float(row["contender"][len("group, k = ") :]): row for row in rows_of(newest(runs)) if row["predicted"]}
    measured: dict[float, Value] = {k: tuple(row["speed_up"]) for k, row in rows.items()}
    predicted: dict[float, Value] = {k: row["predicted"] for k, row in rows.items()}
    series = {"measured (quartiles)": measured, THEOREM: predicted}
    return lines(
        "Speed-up of a worker group over the same two stages", series, "k, candidates for a token", reference=1.0
    )
