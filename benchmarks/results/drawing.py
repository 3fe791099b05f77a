# SPDX-License-Identifier: Apache-2.0
"""Plots of results as SVG: sorted bars, and curves."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
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
    """A contender's value, with its quartiles."""

    label: str
    whose: str  # of COLOURS
    value: float
    interval: tuple[float, float]


class Bars(NamedTuple):
    """A panel of bars."""

    title: str
    bars: Sequence[Bar]


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


def bars(title: str, x_label: str, panels: Sequence[Bars], across: int = 2) -> Plot:
    """Panels of sorted horizontal bars of ratios, from 1, with intervals, coloured by whose method it is."""

    def plot() -> Any:
        columns = min(across, len(panels))
        down = -(-len(panels) // columns)
        most = max(len(panel.bars) for panel in panels)
        figure, axes = plt.subplots(down, columns, figsize=(WIDTH, down * (0.75 + 0.2 * most) + 0.7), squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            ascending = sorted(panel.bars, key=lambda bar: bar.value)
            for place, bar in enumerate(ascending):
                low, high = bar.interval
                spread = [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]]
                axis.barh(place, bar.value - 1, 0.7, left=1, color=COLOURS[bar.whose], xerr=spread,
                          error_kw={"elinewidth": 1, "capsize": 2})  # fmt: skip
            axis.set_yticks(range(len(ascending)), [bar.label for bar in ascending])
            axis.axvline(1, color="0.3", linewidth=0.8)
            axis.locator_params(axis="x", nbins=5 if columns < 3 else 3)
            axis.set_title(panel.title, fontsize=9)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_axis_off()
        for axis in axes.flat[max(0, len(panels) - columns) : len(panels)]:
            axis.set_xlabel(x_label)
        there = {bar.whose for panel in panels for bar in panel.bars}
        if len(there) > 1:
            handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[whose]) for whose in COLOURS if whose in there]
            figure.legend(handles, [whose for whose in COLOURS if whose in there], loc="outside lower center", ncols=3)
        _entitle(figure, title)
        return figure

    return plot


def lines(title: str, x_label: str, y_label: str, curves: Sequence[Line]) -> Plot:
    """Curves in a pair of axes; what a paper published is dashed."""

    def plot() -> Any:
        figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
        colours: dict[str, str] = {}
        for line in curves:
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


def _legend(figure: Any, axis: Any) -> None:
    """Below the axes, in as many columns as the longest label leaves room for."""
    handles, labels = axis.get_legend_handles_labels()
    columns = int(WIDTH * CHARACTERS / (max(map(len, labels)) + 6))
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(3, columns)))


def _entitle(figure: Any, title: str) -> None:
    wrapped = [textwrap.fill(line, int(WIDTH * CHARACTERS)) for line in title.splitlines()]
    figure.suptitle("\n".join(wrapped), fontsize=10)
