# SPDX-License-Identifier: Apache-2.0
"""Markdown tables and plots from files of results.

    python -m vllm_ppd.benchmarks.report FILE.json ...                    # print tables
    # Draw greedy speed-ups
    python -m vllm_ppd.benchmarks.report FILE.json --plot speeds.svg
    # Write benchmarks/results/README.md
    python -m vllm_ppd.benchmarks.report --page

The page has a section for each benchmarks/results/NAME.json, with the title and the
notes of NAME.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.storage import BASE, Run, Turn, turns_of
from vllm_ppd.heads.text import table

RESULTS = Path(__file__).resolve().parent / "results"
RESAMPLES = 2000
CONFIDENCE = 0.9
SPEED_LEGEND = """\
batch: tokens/s of all requests while all of them decode; for other systems the speed-up over vLLM
alone in the same round (median and 90 % bootstrap interval over rounds). accepted: accepted /
drafted tokens. same tokens: greedy tokens that equal those of vLLM alone at the same position, over
all batches; all tokens after the first difference count. memory: peak of the GPU, or of the
process."""
ACCEPTANCE_LEGEND = """\
same text: prompts whose greedy text equals that of vLLM alone, token for token. accepted, drafted:
drafts per decode step of a request (90 % bootstrap interval over batches). by position: share of
steps in which the drafts up to the first, second, ... position were accepted. cost: weights that
the drafts of a step read, relative to a pass of the target."""


class Estimate(NamedTuple):
    """A value and its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def bootstrap(
    statistic: Callable[..., Any], *values: Sequence[float]
) -> Estimate:
    """A statistic of columns of n values, and its interval when the rows are resampled.

    Args:
        statistic: maps arrays [..., n] to [...].
        values: columns of n numbers.
    """
    arrays = [np.asarray(column, dtype=float) for column in values]
    chosen = np.random.default_rng(0).integers(
        len(arrays[0]), size=(RESAMPLES, len(arrays[0]))
    )
    samples = statistic(*(array[chosen] for array in arrays))
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(statistic(*arrays)), float(low), float(high))


def median(values: Any) -> Any:
    return np.median(values, axis=-1)


def ratio_of_sums(numerators: Any, denominators: Any) -> Any:
    return numerators.sum(-1) / denominators.sum(-1)


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of the columns that have values."""
    kept = [
        number
        for number in range(len(header))
        if any(row[number] != "-" for row in rows)
    ]
    return table(
        [header[number] for number in kept],
        [[row[number] for number in kept] for row in rows],
    )


def total(turns: list[Turn], key: str) -> Any:
    return sum(turn[key] for turn in turns)


def speeds(run: Run, name: str, batch: int) -> dict[Any, float]:
    """Tokens per second of a system's turns, by group (of older results) and round."""
    by_place = {}
    for turn in turns_of(run, contender=name, batch=batch):
        speed = turn["window_tokens"] / turn["window_seconds"]
        by_place[turn.get("group"), turn["round"]] = speed
    return by_place


def speed_up(run: Run, name: str, batch: int) -> Estimate | None:
    """Over vLLM alone in the same round; None without turns."""
    base = speeds(run, BASE, batch)
    ratios = [
        speed / base[place] for place, speed in speeds(run, name, batch).items()
    ]
    return bootstrap(median, ratios) if ratios else None


def share(turns: list[Turn], part: str, whole: str) -> float | None:
    """Sum over turns of a part, relative to that of the whole."""
    amount = total(turns, whole)
    return total(turns, part) / amount if amount else None


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def speed_table(run: Run) -> str:
    """A row for each system, a column for each batch size."""
    sizes = sorted({turn["batch"] for turn in run["turns"]})
    header = ["system", *(f"batch {size}" for size in sizes)]
    header += ["Theorem 4.1", "accepted", "same tokens", "memory MB"]
    rows = []
    for name in run["contenders"]:
        turns = turns_of(run, contender=name)
        if not turns:
            continue
        row = [name]
        for size in sizes:
            if name == BASE:
                speed = median([*speeds(run, name, size).values()])
                row.append(f"{speed:.1f} tokens/s")
            else:
                row.append(str(speed_up(run, name, size) or "-"))
        row.append(run.get("predicted", {}).get(name, "-"))
        row.append(shown(share(turns, "accepted_tokens", "draft_tokens"), ".2f"))
        same = None
        if not run["options"]["temperature"]:
            same = share(turns, "same_tokens", "compared_tokens")
        row.append(shown(same, ".2%"))
        memory = max(turn["peak_bytes"] or 0 for turn in turns)
        row.append(f"{memory / 1e6:.0f}" if memory else "-")
        rows.append(row)
    return markdown(header, rows)


def acceptance_table(run: Run) -> str:
    """A row for each system."""
    rows = []
    for name in run["contenders"]:
        turns = turns_of(run, contender=name)
        if name == BASE or not turns:
            continue
        steps = request_steps(turns)
        same = "-"
        if not run["options"]["temperature"]:
            prompts = total(turns, "prompts")
            others = sum(len(turn["differ"]) for turn in turns)
            same = f"{prompts - others} of {prompts}"
        accepted = [turn["accepted_tokens"] for turn in turns]
        drafted = total(turns, "draft_tokens") / sum(steps)
        rows.append(
            [
                name,
                same,
                bootstrap(ratio_of_sums, accepted, steps),
                by_position(turns),
                f"{drafted:.2f}",
                run.get("costs", {}).get(name, "-"),
            ]
        )
    header = ["system", "same text", "accepted", "by position", "drafted", "cost"]
    return markdown(header, rows)


def request_steps(turns: list[Turn]) -> list[int]:
    """Decode steps of all requests in each turn; older results name them steps."""
    return [
        turn["request_steps"] if "request_steps" in turn else turn["steps"]
        for turn in turns
    ]


def by_position(turns: list[Turn]) -> str:
    """The share of steps in which the drafts up to each position were accepted."""
    lengths = [turn.get("accepted_lengths", []) for turn in turns]
    steps = sum(request_steps(turns))
    shares = []
    for position in range(1, max(map(len, lengths))):
        reached = sum(sum(counts[position:]) for counts in lengths)
        shares.append(f"{reached / steps:.2f}")
    return ", ".join(shares) or "-"


def category_table(run: Run) -> str:
    """Accepted drafts per step, a column for each category; empty if there is only one."""
    categories = sorted({turn.get("category", "") for turn in run["turns"]})
    if len(categories) < 2:
        return ""
    rows = []
    for name in run["contenders"]:
        row = [name]
        for category in categories:
            turns = turns_of(run, contender=name, category=category)
            if turns:
                accepted = total(turns, "accepted_tokens")
                row.append(f"{accepted / sum(request_steps(turns)):.2f}")
        if name != BASE and len(row) > len(categories):
            rows.append(row)
    return markdown(["accepted", *categories], rows)


def report(runs: list[Run]) -> str:
    """The tables of runs, with what was measured, and what the columns mean."""
    blocks = []
    legend = ""
    for run in runs:
        if not run["turns"]:
            continue
        options = run["options"]
        # Earlier results have the second name
        length = options.get("output_len") or options["new_tokens"]
        sampling = "greedy"
        if options["temperature"]:
            top_p = options.get("top_p", 1)
            sampling = f"temperature {options['temperature']:g}, top-p {top_p:g}"
        blocks.append(
            f"{options['model']}, {options['dtype']}, {sampling}, "
            f"{length} tokens; {run['machine']}; commit "
            f"{str(run['git'])[:7]}"
        )
        if "part" in run["turns"][0]:
            blocks += [acceptance_table(run), category_table(run)]
            legend = ACCEPTANCE_LEGEND
        else:
            blocks.append(speed_table(run))
            legend = SPEED_LEGEND
        blocks += [f"left out: {reason}" for reason in run["failures"].values()]
    return "\n\n".join(block for block in [*blocks, legend] if block)


def rows_table(data: dict[str, Any]) -> str:
    """The rows of any other file of results, as they are stored."""
    rows = data["rows"]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown(
        header, [[row.get(name, "-") for name in header] for row in rows]
    )


def section(path: Path) -> str:
    """The title and notes of a file of results, its commands and its tables."""
    data = json.loads(path.read_text())
    about = path.with_suffix(".md")
    notes = about.read_text().strip() if about.exists() else f"# {path.stem}"
    if "runs" in data:
        runs = data["runs"]
        tables = report(runs)
    else:
        runs = [data]
        tables = f"{data['machine']}\n\n{rows_table(data)}"
    commands = [
        f"`{run['command']}`, {run['time'][:10]}, commit {str(run['git'])[:7]}."
        for run in runs
    ]
    return "\n\n".join([f"#{notes}", *dict.fromkeys(commands), tables])


def plot(path: Path, out: Path) -> None:
    """Draw the greedy speed-ups of a file over the batch size, with their intervals."""
    import matplotlib.pyplot as plt

    run = next(
        run
        for run in json.loads(path.read_text())["runs"]
        if not run["options"]["temperature"]
    )
    sizes = sorted({turn["batch"] for turn in run["turns"]})
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name in run["contenders"]:
        estimates = [speed_up(run, name, size) for size in sizes]
        if name == BASE or None in estimates:
            continue
        value, low, high = np.array(estimates).T
        axes.errorbar(
            sizes,
            value,
            yerr=(value - low, high - value),
            marker="o",
            capsize=3,
            label=name,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        title=f"Greedy decoding, {run['machine']}",
        xlabel="requests",
        ylabel="speed-up over vLLM alone",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the first file"
    )
    parser.add_argument(
        "--page", action="store_true", help="write the page of stored results"
    )
    args = parser.parse_args()
    if args.page:
        sections = [section(path) for path in sorted(RESULTS.glob("*.json"))]
        page = "\n\n".join(
            [(RESULTS / "introduction.md").read_text().strip(), *sections]
        )
        (RESULTS / "README.md").write_text(page + "\n")
    elif args.plot:
        plot(args.files[0], args.plot)
    else:
        print("\n\n".join(section(path) for path in args.files))


if __name__ == "__main__":
    main()
