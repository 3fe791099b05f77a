# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the documentation, from the newest run of each file of results."""

from pathlib import Path

from vllm_ppd.benchmarks.acceptance import run as acceptance
from vllm_ppd.benchmarks.decode.table import about_control, about_noise, equal_tokens, rows_of
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.estimates import number, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, stored
from vllm_ppd.benchmarks.results import outdated
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.io import load_calibration, load_config
from vllm_ppd.heads.planning.gate import best_speedups
from vllm_ppd.heads.planning.machine import measured as times_of
from vllm_ppd.heads.planning.predict import drafting_settings
from vllm_ppd.heads.planning.recommend import recommend
from vllm_ppd.heads.svg import Value, bars, lines

THEOREM = "Theorem 4.1"
TENSOR_PARALLEL = "TP 2"
HEADS = Path(__file__).resolve().parent.parent / "smollm" / "heads"
CALIBRATED = {"cp": "cp", "ppd early": "early"}  # folders of HEADS by the contender's name
SAME, MEMORY = "greedy tokens equal to vLLM's", "memory MB"
TEMPERATURES = (0.0, 0.6)  # of the speeds in README; the results page has them all


def tables(folder: Path) -> dict[str, str]:
    """Markdown tables by the names that documents use, from the existing files of results."""
    made = {
        "acceptance_headline": ("acceptance", acceptance.headline), "speed_headline": ("smollm_decode", speeds),
        "gpu_headline": ("gpu_decode", speeds), "group_headline": ("group", group),
        "predictions": ("smollm_decode", predictions),
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
    """Speed-ups over vLLM alone: a row per contender, a column per temperature of TEMPERATURES and batch.

    The last columns have the share of greedy tokens equal to vLLM's over all batches, and the peak of memory. A control
    that shares vLLM's engine has no row, since its difference from 1 is not the noise between engines.
    """
    shown = [measured for measured in runs if measured.run["options"]["temperature"] in TEMPERATURES]
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    notes: list[str] = []
    for measured in shown:
        sampling = _sampling(measured)
        left_out = {BASE, CONTROL} if _control_shares(measured) else {BASE}
        rows = [row for row in rows_of(measured) if row["contender"] not in left_out]
        columns += [f"{sampling}, batch {size}" for (size,) in sorted(measured.places("batch"))]
        control = "" if CONTROL in left_out else about_control(measured)
        notes.append(" ".join(filter(None, [f"{sampling}: {_prompts(measured)}.", control, *about_noise(measured)])))
        for row in rows:
            of_contender = cells.setdefault(row["contender"], {})
            of_contender[f"{sampling}, batch {row['batch']}"] = with_quartiles(row["speed_up"], 2)
            of_contender.setdefault(MEMORY, f"{row['peak_bytes'] / 1e6:.0f}")
        for name, share in equal_tokens(measured).items():
            cells.get(name, {})[SAME] = f"{share:.2%}"
    columns += [SAME, MEMORY]
    names = sorted(cells, key=lambda name: name != CONTROL)  # the noise first
    lines = [[name, *(cells[name].get(column, "-") for column in columns)] for name in names]
    return "\n\n".join([table(["speed-up", *columns], lines), "\n".join(f"- {note}" for note in notes)])


def _sampling(measured: Measured) -> str:
    temperature, top_p = measured.run["options"]["temperature"], measured.run["options"].get("top_p", 1)
    if not temperature:
        return "greedy"
    return f"T {temperature:g}" + (f", top-p {top_p:g}" if top_p < 1 else "")


def _control_shares(measured: Measured) -> bool:
    """Whether the control took its turns on the engine of vLLM alone."""
    return measured.contenders.get(CONTROL, {}).get("shares") == BASE


def _prompts(measured: Measured) -> str:
    """The number of prompts at each batch size, as many as a contender had at least."""
    counts: list[str] = []
    for (size,) in sorted(measured.places("batch")):
        turns = [row["turns"] for row in rows_of(measured) if row["batch"] == size and row["contender"] != BASE]
        counts.append(f"{size * min(turns)}{'' if counts else ' prompts'} at batch {size}")
    return ", ".join(counts)


def group(runs: list[Measured]) -> str:
    """Speed-ups of worker groups over the same two stages, beside those of the theorem."""
    rows = [row for row in rows_of(newest(runs)) if row["contender"] != BASE]
    lines = [[r["contender"], with_quartiles(r["speed_up"], 2), number(r["predicted"], "{:.2f}")] for r in rows]
    return table(["speed-up over two stages", "measured", THEOREM], lines)


def predictions(runs: list[Measured]) -> str:
    """Predicted speed-ups of SmolLM2's heads beside those measured in an engine, by batch size.

    Predictions are by the times of the calibration, as `ppd plan` makes them; that of the model card is by the weights
    that drafts read, for sampled texts at batch 1.
    """
    unlimited = [measured for measured in runs if measured.run["options"].get("top_p", 1) == 1]
    sizes = sorted({size for measured in unlimited for (size,) in measured.places("batch")})
    lines = []
    for measured in unlimited:
        temperature = measured.run["options"]["temperature"]
        rows = {(row["contender"], row["batch"]): row for row in rows_of(measured)}
        for name, kind in CALIBRATED.items():
            config, parts = load_config(HEADS / kind), load_calibration(HEADS / kind)
            machine = times_of(parts.timing.seconds)
            settings = list(drafting_settings(None, config, parts, machine, greedy=not temperature))
            predicted = best_speedups(settings, sizes)
            card = f"{recommend(config, parts)['predicted_speedup']:.2f}" if temperature else "-"
            cells = [f"{predicted[size]:.2f}; {with_quartiles(rows[name, size]['speed_up'], 2)}" for size in sizes]
            lines.append([name, _sampling(measured), card, *cells])
    columns = [f"batch {size}: `ppd plan`; measured" for size in sizes]
    return table(["heads", "texts", "model card, batch 1", *columns], lines)


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
    title = "Share of decode steps in which the drafts up to a position were accepted, greedy"
    return lines(title, series, "position of the draft") if series else ""


def speed_bars(runs: list[Measured]) -> str:
    """Speed-ups by batch size; contenders that share another's engine are left to the table."""
    groups: dict[str, dict[str, Value]] = {}
    run = newest(runs)
    for row in rows_of(run):
        if row["contender"] not in (BASE, CONTROL) and not run.contenders[row["contender"]].get("shares"):
            groups.setdefault(f"batch {row['batch']}", {})[row["contender"]] = tuple(row["speed_up"])
    return bars("Speed-up over vLLM alone, greedy (median, quartiles)", groups, reference=1.0)


def step_bars(runs: list[Measured]) -> str:
    """Milliseconds per token, since a step gives more tokens with drafts; labels say how many steps had drafts."""
    run = newest(runs)
    rows = [row for row in rows_of(run) if row["batch"] == 1 and row["contender"] != CONTROL]
    parts = ("target's pass", "drafting", "host")
    split: dict[str, dict[str, Value]] = {}
    for row in rows:
        turns = [turn for turn, _ in run.paired(row["contender"], batch=1)]
        steps, tokens, drafts = (sum(turn[key] for turn in turns) for key in ("steps", "window_tokens", "drafts"))
        label = row["contender"] if row["contender"] == BASE else f"{row['contender']} ({min(drafts / steps, 1):.0%})"
        split[label] = {part: ms * steps / tokens for part, ms in zip(parts, row["split_ms"], strict=True)}
    title = "Milliseconds per token at batch 1, greedy (in brackets: share of steps with drafts)"
    return bars(title, split, stacked=True)


def group_lines(runs: list[Measured]) -> str:
    rows = {float(row["contender"][len("group, k = ") :]): row for row in rows_of(newest(runs)) if row["predicted"]}
    measured: dict[float, Value] = {k: tuple(row["speed_up"]) for k, row in rows.items()}
    predicted: dict[float, Value] = {k: row["predicted"] for k, row in rows.items()}
    series = {"measured (quartiles)": measured, THEOREM: predicted}
    parallel = [row for row in rows_of(newest(runs)) if row["contender"] == TENSOR_PARALLEL]
    series |= {f"{TENSOR_PARALLEL}, no group": dict.fromkeys(rows, tuple(row["speed_up"])) for row in parallel}
    return lines(
        "Speed-up of a worker group over the same two stages", series, "k, candidates for a token", reference=1.0
    )
