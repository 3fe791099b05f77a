# SPDX-License-Identifier: Apache-2.0
"""Pictures of the stored results, for light and dark pages.

    python -m vllm_ppd.benchmarks.pictures       # writes benchmarks/results/plots

A method has the same color everywhere: ours are blue, vLLM's are gray.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from vllm_ppd.benchmarks.report import (
    RESULTS,
    by_category,
    speed_up,
    speeds,
    stored,
)
from vllm_ppd.benchmarks.storage import BASE, Run, turns_of

THEMES = {"": "default", "-dark": "dark_background"}
# Text stays text, and the same picture is the same file
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vllm-ppd", "font.size": 8}
COLORS = {
    "eagle": "#a0a0a0",
    "ngram": "#707070",
    "ngram_gpu": "#707070",
    "early": "#9bd1f0",
    "dynamo": "#45b5c4",
    "lookup": "#8fa8f0",
    "ppd": "#143d8f",
    "cp alone": "#a6c8f0",
    "cp": "#4f9be8",
    "cp + lookup": "#2460c8",
}
SYNTHETIC = "(synthetic), one H200, bfloat16, greedy"
SPEEDS = {
    "gpu_decode": f"SmolLM2-135M widened to 8.9B {SYNTHETIC}",
    "gpu_decode_4b": f"SmolLM2-135M widened to 4.0B {SYNTHETIC}",
    "smollm_decode": "SmolLM2-135M-Instruct, two CPU cores, float32, greedy",
}


def greedy_runs(name: str) -> list[Run]:
    return [run for run in stored(name) if not run["options"]["temperature"]]


def draw_speeds(axes: Axes, name: str) -> None:
    """Speedup of each system by batch size, with the interval over rounds."""
    runs = {
        turn["batch"]: run for run in greedy_runs(name) for turn in run["turns"]
    }
    sizes = sorted(runs)
    run = runs[sizes[0]]
    shown = [system for system in COLORS if system in run["contenders"]]
    width = 0.85 / len(shown)
    places = np.arange(len(sizes))
    for number, system in enumerate(shown):
        estimates = [speed_up(runs[size], system, size) for size in sizes]
        value, low, high = np.array(estimates).T
        bars = axes.bar(
            places + number * width,
            value,
            width * 0.9,
            yerr=(value - low, high - value),
            ecolor=plt.rcParams["text.color"],
            color=COLORS[system],
            label=system,
        )
        axes.bar_label(
            bars,
            fmt="%.2f",
            rotation=90,
            padding=2,
        )
    axes.axhline(1, color=plt.rcParams["text.color"])
    axes.margins(y=0.15)
    ticks = [
        f"batch {size}\n{size * len(speeds(runs[size], BASE, size))} prompts"
        for size in sizes
    ]
    axes.set_xticks(places + 0.4, ticks)
    axes.set(
        title=f"{SPEEDS[name]}\n{run['time'][:10]}, commit {run['git'][:7]}",
        ylabel="speedup over vLLM without speculation",
    )
    axes.legend(title="gray: vLLM's own", bbox_to_anchor=(1, 0.8))


def draw_categories(axes: Axes, name: str) -> None:
    """Accepted drafts per step of each system and category of prompts."""
    (run,) = greedy_runs(name)
    accepted = by_category(run)
    systems = [system for system in COLORS if system in accepted]
    values = np.array([[*accepted[system].values()] for system in systems])
    axes.imshow(values, cmap="Blues", vmax=3, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        axes.text(
            column, row, f"{value:.2f}", color="black", ha="center", va="center"
        )
    categories = accepted[systems[0]]
    axes.set_xticks(range(len(categories)), categories, rotation=40, ha="right")
    axes.set_yticks(range(len(systems)), systems)
    axes.set(
        title="Accepted drafts per step, greedy, of up to 3",
        xlabel="category of Spec-Bench, 8 or 64 prompts each",
    )


def draw_learning(axes: Axes, name: str) -> None:
    """Tokens per step while heads are learned, and with lookups alone, by tokens served."""
    (run,) = stored(name)
    for system in ("lookup", "ppd"):
        turns = turns_of(run, contender=system)
        steps = np.array([turn["request_steps"] for turn in turns])
        tokens = steps + [turn["accepted_tokens"] for turn in turns]
        axes.plot(tokens.cumsum(), tokens / steps, COLORS[system], label=system)
    axes.set(
        title="SmolLM2-135M-Instruct, T 0.8, 8 requests, drafts in every step",
        xlabel="tokens served",
        ylabel="tokens per request and step",
    )
    axes.legend()


PICTURES = {
    **dict.fromkeys(SPEEDS, draw_speeds),
    "acceptance": draw_categories,
    "learning": draw_learning,
}


def main(folder: Path = RESULTS / "plots") -> None:
    """Write NAME.svg and NAME-dark.svg for each picture."""
    for name, artist in PICTURES.items():
        for suffix, theme in THEMES.items():
            with plt.style.context([theme, STYLE]):
                figure, axes = plt.subplots(
                    figsize=(8, 3.6), layout="constrained"
                )
                artist(axes, name)
                figure.savefig(
                    folder / f"{name}{suffix}.svg",
                    transparent=True,
                    metadata={"Date": None},
                )
                plt.close(figure)


if __name__ == "__main__":
    main()
