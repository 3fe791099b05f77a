# SPDX-License-Identifier: Apache-2.0
"""Pictures of the stored results, for light and dark pages.

    python -m vllm_ppd.benchmarks.pictures       # writes benchmarks/results/plots

A method has the same color everywhere: ours are blue, vLLM's are grey.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from vllm_ppd.benchmarks.report import (
    RESULTS,
    by_category,
    categories_of,
    predictions,
    speed_up,
)
from vllm_ppd.benchmarks.storage import BASE, Run, turns_of

THEMES = {"": "#1f2328", "-dark": "#e6edf3"}  # suffix of the file, color of text
COLORED = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
)
COLORS = {
    "vLLM, again": "#d4d4d4",
    "medusa": "#c0c0c0",
    "eagle": "#a0a0a0",
    "ngram": "#707070",
    "ngram_gpu": "#707070",
    "early": "#9bd1f0",
    "ppd early": "#9bd1f0",
    "dynamo": "#45b5c4",
    "lookup": "#8fa8f0",
    "cp": "#4f9be8",
    "cp + lookup": "#2460c8",
    "group": "#7a63d8",
}
PEERS = tuple(COLORS)[:5]  # vLLM's own
SYNTHETIC = "SmolLM2-135M widened to {} (synthetic), one H200, bfloat16, greedy"
SPEEDS = {
    "gpu_decode": SYNTHETIC.format("8.9B"),
    "gpu_decode_4b": SYNTHETIC.format("4.0B"),
    "smollm_decode": "SmolLM2-135M-Instruct, two CPU cores, bfloat16, greedy",
}


def greedy_runs(name: str) -> list[Run]:
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return [run for run in runs if not run["options"]["temperature"]]


def draw_speeds(axes: Axes, name: str) -> None:
    """Speedup of each system by batch size, with the interval over rounds."""
    (run,) = greedy_runs(name)
    contenders = run["contenders"]
    # A contender that shares an engine repeats another
    shown = [
        name
        for name in COLORS
        if name in contenders and "shares" not in contenders[name]
    ]
    sizes = sorted({turn["batch"] for turn in run["turns"]})
    width = 0.85 / len(shown)
    for number, system in enumerate(shown):
        estimates = [speed_up(run, system, size) for size in sizes]
        value, low, high = np.array(estimates, dtype=float).T
        places = np.arange(len(sizes)) + (number - (len(shown) - 1) / 2) * width
        label = f"{system} (vLLM)" if system in PEERS else system
        axes.bar(places, value, width * 0.9, color=COLORS[system], label=label)
        ends = (value - low, high - value)
        color = plt.rcParams["text.color"]
        axes.errorbar(
            places, value, ends, fmt="none", ecolor=color, linewidth=0.8
        )
        for place, speed, end in zip(places, value, high, strict=True):
            text = f"{speed:.2f}"
            axes.text(
                place, end + 0.04, text, rotation=90, ha="center", fontsize=7
            )
    axes.axhline(1, color=plt.rcParams["text.color"], linewidth=0.8)
    axes.margins(y=0.15)
    ticks = []
    for size in sizes:
        rounds = len(turns_of(run, contender=BASE, batch=size))
        ticks.append(f"batch {size}\n{rounds} rounds, {rounds * size} prompts")
    axes.set_xticks(range(len(sizes)), ticks)
    axes.set_title(f"{SPEEDS[name]}\n{run['time'][:10]}, commit {run['git'][:7]}")
    axes.set_ylabel("speedup over vLLM without speculation")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_predictions(axes: Axes, _: str) -> None:
    """Measured over predicted speedups at batch 1; perfect predictions lie on the line."""
    for name, predicted, (value, low, high) in predictions():
        system, _, setting = name.partition(", ")
        sampled = setting == "T 0.8"
        axes.errorbar(
            predicted,
            value,
            ([value - low], [high - value]),
            color=COLORS[system],
            marker="s" if sampled else "o",
        )
        axes.annotate(
            name,
            (predicted, value),
            (-5, -9) if sampled else (5, 4),
            textcoords="offset points",
            ha="right" if sampled else "left",
            fontsize=7,
        )
    axes.margins(x=0.12)
    axes.axline((1, 1), slope=1, color=plt.rcParams["text.color"], linewidth=0.8)
    axes.set_title(
        "Predicted and measured, batch 1, two CPU cores\n4 prompts each (group: 5)"
    )
    axes.set_xlabel("predicted speedup")
    axes.set_ylabel("measured speedup")


def draw_categories(axes: Axes, name: str) -> None:
    """Accepted drafts per step of each system and category of prompts."""
    runs = [run for run in greedy_runs(name) if run["prompts"] == 130]
    accepted = {}
    for run in runs:
        accepted.update(by_category(run))
    systems = [system for system in COLORS if system in accepted]
    categories = categories_of(runs[0])
    values = np.array([accepted[system] for system in systems])
    axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        color = "white" if value > values.max() / 2 else "black"
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color=color,
            fontsize=8,
        )
    axes.set_xticks(range(len(categories)), categories, rotation=40, ha="right")
    axes.set_yticks(range(len(systems)), systems)
    axes.set_xlabel("category of Spec-Bench, 8 to 14 prompts each")
    axes.set_title("Accepted drafts per step, greedy, of up to 3 (dynamo: 2)")


def draw(name: str, artist: Callable[[Axes, str], None], folder: Path) -> None:
    """Write NAME.svg and NAME-dark.svg."""
    for suffix, color in THEMES.items():
        style: dict[str, Any] = {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": name,
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
        style.update(dict.fromkeys(COLORED, color))
        with plt.rc_context(style):
            figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
            artist(axes, name)
            path = folder / f"{name}{suffix}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)


def main(folder: Path = RESULTS / "plots") -> None:
    for name in SPEEDS:
        draw(name, draw_speeds, folder)
    draw("predicted", draw_predictions, folder)
    draw("acceptance", draw_categories, folder)


if __name__ == "__main__":
    main()
