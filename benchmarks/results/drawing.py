# SPDX-License-Identifier: Apache-2.0
"""Plots of results as SVG; the same data give the same bytes with the same matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "vllm-ppd", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
    "savefig.bbox": "tight", "savefig.pad_inches": 0.15,
}  # fmt: skip
OURS, THEIRS, ALONE = "vllm-ppd", "vLLM's own methods", "vLLM alone"
COLOURS = {OURS: "C0", THEIRS: "C1", ALONE: "0.6"}
CHARACTERS = 13  # of text in an inch
WIDTH = 8.4  # inches

Plot = Callable[[], Any]  # makes a figure


class Bar(NamedTuple):
    """One contender's value; the interval is None where it is not known."""

    label: str
    whose: str  # of COLOURS
    value: float
    interval: tuple[float, float] | None = None


class Bars(NamedTuple):
    """One pair of axes of bars, sorted by value."""

    title: str
    found: Sequence[Bar]


class Line(NamedTuple):
    """A curve; the same label has the same colour, whoever measured it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    published: bool = False  # by a paper: dashed


def svg(plot: Plot) -> str:
    """The figure's file, without a date."""
    with plt.rc_context(SETTINGS):
        figure = plot()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def png(plot: Plot, path: Path) -> None:
    """Write the figure, to look at."""
    with plt.rc_context(SETTINGS):
        figure = plot()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def bars(title: str, x_label: str, panels: Sequence[Bars], level: float = 0.0, across: int = 2) -> Plot:
    """Panels of sorted horizontal bars with intervals, coloured by whose method it is, from a level."""

    def plot() -> Any:
        columns = min(across, len(panels))
        down = -(-len(panels) // columns)
        most = max(len(panel.found) for panel in panels)
        figure, axes = plt.subplots(down, columns, figsize=(WIDTH, down * (0.75 + 0.2 * most) + 0.7), squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            found = sorted(panel.found, key=lambda bar: bar.value)
            for place, bar in enumerate(found):
                low, high = bar.interval or (bar.value, bar.value)
                spread = [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]] if bar.interval else None
                axis.barh(place, bar.value - level, 0.7, left=level, color=COLOURS[bar.whose], xerr=spread,
                          error_kw={"elinewidth": 1, "capsize": 2})  # fmt: skip
            axis.set_yticks(range(len(found)), [bar.label for bar in found])
            axis.axvline(level, color="0.3", linewidth=0.8)
            axis.locator_params(axis="x", nbins=5 if columns < 3 else 3)
            axis.set_title(panel.title, fontsize=9)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_axis_off()
        for axis in axes.flat[max(0, len(panels) - columns) : len(panels)]:
            axis.set_xlabel(x_label)
        there = {bar.whose for panel in panels for bar in panel.found}
        if len(there) > 1:
            handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[whose]) for whose in COLOURS if whose in there]
            figure.legend(handles, [whose for whose in COLOURS if whose in there], loc="outside lower center", ncols=3)
        _entitle(figure, title)
        return figure

    return plot


def lines(title: str, x_label: str, y_label: str, found: Sequence[Line]) -> Plot:
    """Curves in one pair of axes; what a paper published is dashed."""

    def plot() -> Any:
        figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
        colours: dict[str, str] = {}
        for line in found:
            colour = colours.setdefault(line.label, f"C{len(colours) % 10}")
            style = "--" if line.published else "-"
            label = f"{line.label}, {'paper' if line.published else 'ours'}"
            axis.plot(line.x, line.y, style, color=colour, marker="o", markersize=3.5, linewidth=1.2, label=label)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        _legend(figure, axis)
        _entitle(figure, title)
        return figure

    return plot


def stacks(title: str, x_label: str, rows: Sequence[str], parts: dict[str, Sequence[float]]) -> Plot:
    """Horizontal bars, each the sum of its parts: parts by name, a number a row."""

    def plot() -> Any:
        figure, axis = plt.subplots(figsize=(WIDTH, 2.2 + 0.38 * len(rows)))
        left = [0.0] * len(rows)
        for name, widths in parts.items():
            axis.barh(range(len(rows)), widths, left=left, label=name, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set_xlabel(x_label)
        _legend(figure, axis)
        _entitle(figure, title)
        return figure

    return plot


def _legend(figure: Any, axis: Any) -> None:
    """Below the axes, in as many columns as the longest label leaves room for."""
    handles, labels = axis.get_legend_handles_labels()
    columns = int(WIDTH * CHARACTERS / (max(map(len, labels)) + 6))
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(3, columns)))


def _entitle(figure: Any, title: str) -> None:
    wrapped = [textwrap.fill(line, int(WIDTH * CHARACTERS)) for line in title.splitlines()]
    figure.suptitle("\n".join(wrapped), fontsize=10)
