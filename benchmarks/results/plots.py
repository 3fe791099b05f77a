# SPDX-License-Identifier: Apache-2.0
"""Plots of results as SVG; the same data give the same bytes with the same matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

SETTINGS = {
    "svg.hashsalt": "vllm-ppd", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip
DASHED = ("vLLM",)  # lines that others are held against begin with this

Plot = Callable[[], Any]  # makes a figure


class Line(NamedTuple):
    """Values over x; quartiles where they are known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    quartiles: Sequence[tuple[float, float]] = ()


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    lines: Sequence[Line]
    ticks: Sequence[str] = ()  # what stands at x = 0, 1, ... (none: numbers)
    log: bool = False
    level: float | None = None  # a horizontal line: what is even


def svg(plot: Plot) -> str:
    """The figure's file, without a date."""
    with plt.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = plot()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def panels(found: Sequence[Panel], across: int = 2) -> Plot:
    """Lines in panels, with one legend for all."""

    def plot() -> Any:
        across_now = min(across, len(found))
        down = -(-len(found) // across_now)
        figure, axes = plt.subplots(down, across_now, figsize=(4.2 * across_now, 2.9 * down), squeeze=False)
        colours: dict[str, str] = {}
        for axis, panel in zip(axes.flat, found, strict=False):
            for line in panel.lines:
                colour = colours.setdefault(line.label, f"C{len(colours) % 10}")
                errors = [
                    [max(0.0, y - low) for y, (low, _) in zip(line.y, line.quartiles, strict=True)],
                    [max(0.0, high - y) for y, (_, high) in zip(line.y, line.quartiles, strict=True)],
                ] if line.quartiles else None  # fmt: skip
                style = "--" if line.label.startswith(DASHED) else "-"
                axis.errorbar(
                    line.x, line.y, yerr=errors, label=line.label, color=colour, linestyle=style, marker="o",
                    markersize=3, capsize=2, linewidth=1.2,
                )  # fmt: skip
            if panel.level is not None:
                axis.axhline(panel.level, color="0.7", linewidth=0.8, zorder=0)
            if panel.ticks:
                axis.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=25, ha="right")
            if panel.log:
                axis.set_yscale("log")
            axis.set_title(panel.title, fontsize=9)
            axis.set_xlabel(panel.x_label)
        for axis in list(axes.flat)[len(found) :]:
            axis.set_axis_off()
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}  # noqa: B905
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
        return figure

    return plot


def stacks(rows: Sequence[str], parts: dict[str, Sequence[float]], x_label: str) -> Plot:
    """Horizontal bars, each the sum of its parts: parts by name, a number a row."""

    def plot() -> Any:
        figure, axis = plt.subplots(figsize=(8.4, 1.2 + 0.38 * len(rows)))
        left = [0.0] * len(rows)
        for name, widths in parts.items():
            axis.barh(range(len(rows)), widths, left=left, label=name, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set_xlabel(x_label)
        figure.legend(loc="outside lower center", ncols=2)
        return figure

    return plot


def bars(rows: Sequence[str], groups: dict[str, Sequence[float]], x_label: str) -> Plot:
    """Horizontal bars side by side: groups by name, a number a row."""

    def plot() -> Any:
        figure, axis = plt.subplots(figsize=(8.4, 1.2 + 0.3 * len(rows)))
        height = 0.8 / len(groups)
        for index, (name, widths) in enumerate(groups.items()):
            axis.barh([row + height * index for row in range(len(rows))], widths, height=height, label=name)
        axis.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], rows)
        axis.invert_yaxis()
        axis.set_xlabel(x_label)
        figure.legend(loc="outside lower center", ncols=2)
        return figure

    return plot
