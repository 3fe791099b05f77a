# SPDX-License-Identifier: Apache-2.0
"""Markdown tables and plots from files of results.

    python -m vllm_ppd.benchmarks.report FILE.json ...                    # print tables
    python -m vllm_ppd.benchmarks.report FILE.json --plot speeds.svg      # draw greedy speed-ups
    python -m vllm_ppd.benchmarks.report --page                           # write benchmarks/results/README.md

The page has a section for each benchmarks/results/NAME.json, with the title and the notes of NAME.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.storage import Run, Turn
from vllm_ppd.benchmarks.systems import BASE

RESULTS = Path(__file__).resolve().parent / "results"
RESAMPLES = 2000
CONFIDENCE = 0.9
SPEED_LEGEND = """\
batch: tokens/s of all requests while all of them decode; for other systems the speed-up over vLLM alone in the same
round (median and 90 % bootstrap interval over rounds). accepted: accepted / drafted tokens. same tokens: greedy tokens
that equal those of vLLM alone at the same position, over all batches; all tokens after the first difference count.
memory: the peak of the GPU, or of the process."""
ACCEPTANCE_LEGEND = """\
same text: prompts whose greedy text equals that of vLLM alone, token for token. accepted: drafts per step of a request
(90 % bootstrap interval over batches). by position: share of steps in which the drafts up to the first, second, ...
position were accepted. cost: weights that the drafts of a step read, relative to a pass of the target."""


class Estimate(NamedTuple):
    """A value and its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def bootstrap(statistic: Callable[..., Any], *values: Sequence[float]) -> Estimate:
    """A statistic of paired values [n] each, which maps [..., n] to [...], and its interval over resampled pairs."""
    arrays = [np.asarray(column, dtype=float) for column in values]
    chosen = np.random.default_rng(0).integers(len(arrays[0]), size=(RESAMPLES, len(arrays[0])))
    samples = statistic(*(array[chosen] for array in arrays))
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(statistic(*arrays)), float(low), float(high))


def median(values: Any) -> Any:
    return np.median(values, axis=-1)


def ratio_of_sums(numerators: Any, denominators: Any) -> Any:
    return numerators.sum(-1) / denominators.sum(-1)


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose columns are as wide as their widest cell; columns without values are left out."""
    columns = [[name, *(str(row[number]) for row in rows)] for number, name in enumerate(header)]
    columns = [column for column in columns if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in zip(*columns, strict=True)
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def turns_of(run: Run, name: str, **place: Any) -> list[Turn]:
    place["contender"] = name
    return [turn for turn in run["turns"] if all(turn[key] == value for key, value in place.items())]


def speed(turn: Turn) -> float:
    return float(turn["window_tokens"] / turn["window_seconds"])


def speed_up(run: Run, name: str, batch: int) -> Estimate | None:
    """Over vLLM alone in the same round; None without turns."""
    base = {(turn.get("group", 0), turn["round"]): speed(turn) for turn in turns_of(run, BASE, batch=batch)}
    ratios = [speed(turn) / base[turn.get("group", 0), turn["round"]] for turn in turns_of(run, name, batch=batch)]
    return bootstrap(median, ratios) if ratios else None


def share(turns: list[Turn], part: str, whole: str, form: str = "{:.2f}") -> str:
    total = sum(turn.get(whole, 0) for turn in turns)
    return form.format(sum(turn[part] for turn in turns) / total) if total else "-"


def speed_table(run: Run) -> str:
    """A row for each system, a column for each batch size."""
    sizes = sorted({turn["batch"] for turn in run["turns"]})
    header = [
        "system",
        *(f"batch {size}" for size in sizes),
        "Theorem 4.1",
        "accepted",
        "same tokens",
        "memory MB",
    ]
    rows = []
    for name in run["contenders"]:
        turns = turns_of(run, name)
        if not turns:
            continue
        cells = [str(speed_up(run, name, size) or "-") for size in sizes]
        if name == BASE:
            cells = [f"{median([speed(t) for t in turns_of(run, name, batch=size)]):.1f} tokens/s" for size in sizes]
        predicted = run.get("predicted", {}).get(name, {}).values()
        memory = max(turn["peak_bytes"] or 0 for turn in turns)
        rows.append(
            [
                name,
                *cells,
                ", ".join(f"{value:.2f}" for value in predicted) or "-",
                share(turns, "accepted_tokens", "draft_tokens"),
                share(turns, "same_tokens", "compared_tokens", "{:.2%}"),
                f"{memory / 1e6:.0f}" if memory else "-",
            ]
        )
    return markdown(header, rows)


def acceptance_table(runs: list[Run]) -> str:
    """A row for each system of runs with the same options."""
    header = [
        "system",
        "prompts",
        "same text",
        "accepted",
        "by position",
        "drafted",
        "repeated 4-grams",
        "cost",
    ]
    rows = {}
    for run in runs:
        for name in run["contenders"]:
            turns = turns_of(run, name)
            if not turns:
                continue
            prompts = sum(turn["prompts"] for turn in turns)
            steps = [request_steps(turn) for turn in turns]
            accepted = bootstrap(ratio_of_sums, [turn["accepted_tokens"] for turn in turns], steps)
            same = "-"
            if all("differ" in turn for turn in turns):
                same = f"{prompts - sum(len(turn['differ']) for turn in turns)} of {prompts}"
            cost = run.get("costs", {}).get(name)
            rows[name] = [
                name,
                prompts,
                same,
                accepted if name != BASE else "-",
                by_position(turns, sum(steps)),
                f"{sum(turn['draft_tokens'] for turn in turns) / sum(steps):.2f}",
                share(turns, "repeated_4_grams", "all_4_grams"),
                "-" if cost is None else f"{cost:.2f}",
            ]
    return markdown(header, list(rows.values()))


def request_steps(turn: Turn) -> int:
    """Decode steps of all requests; older results have them as steps."""
    return int(turn.get("request_steps", turn["steps"]))


def by_position(turns: list[Turn], steps: int) -> str:
    lengths = [turn.get("accepted_lengths", []) for turn in turns]
    positions = range(1, max(map(len, lengths)))
    reached = [sum(sum(counts[position:]) for counts in lengths) for position in positions]
    return ", ".join(f"{count / steps:.2f}" for count in reached) or "-"


def category_table(runs: list[Run]) -> str:
    """Accepted drafts per step, a column for each category; empty if there is one."""
    categories = sorted({turn.get("category", "") for run in runs for turn in run["turns"]})
    if len(categories) < 2:
        return ""
    rows = []
    for run in runs:
        for name in run["contenders"]:
            if name != BASE:
                turns = [turns_of(run, name, category=category) for category in categories]
                rows.append([name, *(accepted_per_step(some) for some in turns)])
    return markdown(["accepted", *categories], rows)


def accepted_per_step(turns: list[Turn]) -> str:
    if not turns:
        return "-"
    return f"{sum(turn['accepted_tokens'] for turn in turns) / sum(map(request_steps, turns)):.2f}"


def report(runs: list[Run]) -> str:
    """The tables of runs; runs that differ in systems alone share a table of acceptance."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if run["turns"]:
            acceptance = "part" in run["turns"][0]
            key = json.dumps([run["options"], run["machine"], None if acceptance else len(alike)], sort_keys=True)
            alike.setdefault(key, []).append(run)
    blocks = []
    legends = {}
    for group in alike.values():
        run = group[0]
        options = run["options"]
        top_p = f", top-p {options['top_p']:g}" if options["temperature"] and options.get("top_p", 1) < 1 else ""
        blocks.append(
            f"{options['model']}, {options['dtype']}, temperature {options['temperature']:g}{top_p}, "
            f"{options['new_tokens']} tokens; {run['machine']}; commit {str(run['git'])[:7]}"
        )
        if "part" in run["turns"][0]:
            blocks += [acceptance_table(group), category_table(group)]
            legends[ACCEPTANCE_LEGEND] = True
        else:
            blocks.append(speed_table(run))
            legends[SPEED_LEGEND] = True
        blocks += [f"left out: {reason}" for each in group for reason in each["failures"].values()]
    return "\n\n".join(block for block in [*blocks, *legends] if block)


def rows_table(data: dict[str, Any]) -> str:
    """The rows of any other file of results, as they are stored."""
    header = list(dict.fromkeys(name for row in data["rows"] for name in row))
    return markdown(header, [[row.get(name, "-") for name in header] for row in data["rows"]])


def section(path: Path) -> str:
    """The title and notes of a file of results, its commands and its tables."""
    data = json.loads(path.read_text())
    about = path.with_suffix(".md")
    title, _, notes = about.read_text().partition("\n") if about.exists() else (path.stem, "", "")
    runs = data.get("runs", [data])
    commands = dict.fromkeys(f"`{run['command']}`, {run['time'][:10]}, commit {str(run['git'])[:7]}." for run in runs)
    table = report(runs) if "runs" in data else f"{data['machine']}\n\n{rows_table(data)}"
    return "\n\n".join([f"## {title.removeprefix('# ')}", *filter(None, [notes.strip()]), *commands, table])


def plot(path: Path, out: Path) -> None:
    """Draw the greedy speed-ups of a file as bars with their intervals, a group for each batch size."""
    import matplotlib.pyplot as plt

    greedy = [run for run in json.loads(path.read_text())["runs"] if not run["options"]["temperature"]]
    run = greedy[-1]
    sizes = sorted({turn["batch"] for turn in run["turns"]})
    names = [name for name in run["contenders"] if name != BASE and turns_of(run, name)]
    width = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for number, name in enumerate(names):
        found = [(index, speed_up(run, name, size)) for index, size in enumerate(sizes)]
        places = [index + (number + 0.5) * width - 0.4 for index, estimate in found if estimate]
        estimates = [estimate for _, estimate in found if estimate]
        errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
        axes.bar(places, [e.value for e in estimates], width, yerr=errors, capsize=2, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axes.set_ylabel("speed-up over vLLM alone")
    axes.set_title(f"Greedy decoding, {run['machine']}")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the first file")
    parser.add_argument("--page", action="store_true", help="write the page of stored results")
    args = parser.parse_args()
    if args.page:
        sections = [section(path) for path in sorted(RESULTS.glob("*.json"))]
        page = "\n\n".join([(RESULTS / "introduction.md").read_text().strip(), *sections])
        (RESULTS / "README.md").write_text(page + "\n")
    elif args.plot:
        plot(args.files[0], args.plot)
    else:
        print("\n\n".join(section(path) for path in args.files))


if __name__ == "__main__":
    main()
