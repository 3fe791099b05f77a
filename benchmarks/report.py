# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from files of results.

    python -m vllm_ppd.benchmarks.report FILE.json ...                    # print tables
    # Write the tables of the pages in benchmarks/results
    python -m vllm_ppd.benchmarks.report --page

A page has the commands and the tables of NAME.json between the lines <!-- NAME --> and
<!-- end -->. The rest of it is written by hand.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks.storage import BASE, Run, Turn, turns_of
from vllm_ppd.heads.text import table

RESULTS = Path(__file__).resolve().parent / "results"
HEADS = RESULTS.parent / "smollm" / "heads"
RESAMPLES = 2000
CONFIDENCE = 0.9
MARKS = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SPEED_LEGEND = """\
batch: tokens/s of all requests while all of them decode; for other systems the speedup over vLLM
without speculation in the same round (median and 90 % bootstrap interval over rounds). accepted:
accepted / drafted tokens. same tokens: share of greedy tokens that equal those of vLLM without
speculation at the same position. memory: peak of the GPU, or of the process."""
ACCEPTANCE_LEGEND = """\
same text: prompts whose greedy text equals that of vLLM without speculation. accepted, drafted:
drafts per request and decode step (90 % bootstrap interval over batches). by position: share of
steps that accept the drafts up to the first, second, ... position. cost: bytes of weights that
the drafts of a step read, relative to one pass of the target."""


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


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of the columns that have values."""
    columns = [
        column
        for column in zip(header, *rows, strict=True)
        if {*column[1:]} != {"-"}
    ]
    names, *lines = zip(*columns, strict=True)
    return table(names, lines)


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
    """Over vLLM without speculation in the same round; None if there are no turns."""
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
        row.append(shown(run.get("predicted", {}).get(name), ".2f"))
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
        steps = [turn["request_steps"] for turn in turns]
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
                bootstrap(lambda a, s: a.sum(-1) / s.sum(-1), accepted, steps),
                by_position(turns),
                f"{drafted:.2f}",
                run.get("costs", {}).get(name, "-"),
            ]
        )
    header = ["system", "same text", "accepted", "by position", "drafted", "cost"]
    return markdown(header, rows)


def by_position(turns: list[Turn]) -> str:
    """The share of steps in which the drafts up to each position were accepted."""
    lengths = [turn.get("accepted_lengths", []) for turn in turns]
    steps = total(turns, "request_steps")
    shares = []
    for position in range(1, max(map(len, lengths))):
        reached = sum(sum(counts[position:]) for counts in lengths)
        shares.append(f"{reached / steps:.2f}")
    return ", ".join(shares) or "-"


def accepted_drafts(turns: list[Turn]) -> float:
    """Accepted drafts per request and step."""
    return total(turns, "accepted_tokens") / total(turns, "request_steps")


def by_category(run: Run) -> dict[str, dict[str, float]]:
    """Accepted drafts per step of each system but vLLM, by category."""
    categories = sorted({turn.get("category", "") for turn in run["turns"]})
    accepted: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name in run["contenders"]:
        for category in categories:
            turns = turns_of(run, contender=name, category=category)
            if turns and name != BASE:
                accepted[name][category] = accepted_drafts(turns)
    return accepted


def category_table(run: Run) -> str:
    """A column for each category; empty if there is only one."""
    accepted = by_category(run)
    categories = next(iter(accepted.values()), ())
    if len(categories) < 2:
        return ""
    rows = [
        [name, *(shown(values.get(key), ".2f") for key in categories)]
        for name, values in accepted.items()
    ]
    return markdown(["accepted", *categories], rows)


def tables(run: Run) -> list[str]:
    """What a run measured, and its tables."""
    options = run["options"]
    sampling = "greedy"
    if options["temperature"]:
        sampling = (
            f"temperature {options['temperature']:g}, top-p {options['top_p']:g}"
        )
    blocks = [
        f"{options['model']}, {options['dtype']}, {sampling}, "
        f"{options['output_len']} tokens; {run['machine']}; commit {str(run['git'])[:7]}"
    ]
    if "part" in run["turns"][0]:
        blocks += [acceptance_table(run), category_table(run)]
    else:
        blocks.append(speed_table(run))
    blocks += [f"left out: {reason}" for reason in run["failures"].values()]
    return [block for block in blocks if block]


def report(runs: list[Run]) -> str:
    """The tables of runs, and what their columns mean."""
    blocks = []
    for run in runs:
        if run["turns"]:
            blocks += tables(run)
            legend = SPEED_LEGEND
            if "part" in run["turns"][0]:
                legend = ACCEPTANCE_LEGEND
    return "\n\n".join([*blocks, legend]) if blocks else ""


def rows_table(data: dict[str, Any]) -> str:
    """The rows of any other file of results, as they are stored."""
    rows = data["rows"]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown(
        header, [[row.get(name, "-") for name in header] for row in rows]
    )


def section(path: Path) -> str:
    """The commands of a file of results, and its tables."""
    data = json.loads(path.read_text())
    if "runs" in data:
        runs = [run for run in data["runs"] if run["turns"]]
        blocks = [block for run in runs for block in tables(run)]
    else:
        runs = [data]
        blocks = [data["machine"], rows_table(data)]
    commands = [
        f"`{run['command']}`, {run['time'][:10]}, commit {str(run['git'])[:7]}."
        for run in runs
    ]
    return "\n\n".join([*dict.fromkeys(commands), *blocks])


def stored(name: str) -> list[Run]:
    """The runs of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def predictions() -> Iterator[tuple[str, float, Estimate]]:
    """Greedy speedups at batch 1 on two CPU cores, predicted and measured.

    A prediction is that of the heads' calibration, or PPD's Theorem 4.1.
    """
    (run,) = (run for run in stored("smollm_decode") if turns_of(run, batch=1))
    for name in ("cp alone", "dynamo", "early"):
        path = HEADS / name.partition(" ")[0] / "calibration.json"
        chosen = json.loads(path.read_text())["recommendation"]
        if measured := speed_up(run, name, 1):
            yield name, round(chosen["predicted_speedup"], 2), measured
    (group,) = stored("group")
    for name, predicted in group["predicted"].items():
        if measured := speed_up(group, name, 1):
            yield name, round(predicted, 2), measured


def page(text: str) -> str:
    """A page of results with the tables that its marks name."""

    def marked(match: re.Match[str]) -> str:
        if match[2] == "predicted":
            header = ["system", "predicted", "measured"]
            block = markdown(header, [*predictions()])
        else:
            block = section(RESULTS / f"{match[2]}.json")
        return f"{match[1]}\n{block}\n\n{match[3]}"

    return MARKS.sub(marked, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--page", action="store_true", help="write the tables of the pages"
    )
    args = parser.parse_args()
    if args.page:
        for path in sorted(RESULTS.glob("*.md")):
            path.write_text(page(path.read_text()))
    else:
        print("\n\n".join(section(path) for path in args.files))


if __name__ == "__main__":
    main()
