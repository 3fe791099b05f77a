# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG files: grouped or stacked bars, and lines, with intervals; colours follow a light or a dark theme."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from textwrap import wrap

Value = float | tuple[float, float, float]  # a number, or a number with the ends of its interval

WIDTH, HEIGHT = 760, 320  # pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 748, 62, 274  # of the plot
LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#4a3aa7", "#e34948", "#e87ba4", "#008300")
DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#9085e9", "#e66767", "#d55181", "#2ba02b")


def _colors(ink: str, text: str, grid: str, series: Sequence[str]) -> str:
    each = "".join(f".fill{i}{{fill:{color}}}.line{i}{{stroke:{color}}}" for i, color in enumerate(series))
    return f"text{{fill:{text}}}.title{{fill:{ink}}}.grid{{stroke:{grid}}}.axis,.reference{{stroke:{text}}}{each}"


STYLE = (
    "text{font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}path,polyline{fill:none}"
    f"polyline{{stroke-width:2}}.reference{{stroke-dasharray:4 3}}{_colors('#0b0b0b', '#52514e', '#e1e0d9', LIGHT)}"
    f"@media(prefers-color-scheme:dark){{{_colors('#ffffff', '#c3c2b7', '#383835', DARK)}}}"
)


def bars(
    title: str, groups: Mapping[str, Mapping[str, Value]], stacked: bool = False, reference: float | None = None
) -> str:
    """Bars from zero, side by side with their values, or stacked without intervals.

    Args:
        title: what is drawn, and its unit.
        groups: values by group, then by series; a group may lack a series.
        stacked: a bar per group, of all its series.
        reference: a value at which a dashed line stands.
    """
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    values = {label: {name: _interval(value) for name, value in group.items()} for label, group in groups.items()}
    total, most = (sum if stacked else max), 0 if stacked else 2
    highest = max(total(value[most] for value in group.values()) for group in values.values())
    chart = _Chart(title, series, 0.0, max(highest, reference or 0.0), reference)
    step = (RIGHT - LEFT) / len(groups)
    width = min(step * 0.8 / (1 if stacked else len(series)), 56)
    for at, (label, group) in enumerate(values.items()):
        center, base = LEFT + step * (at + 0.5), 0.0
        chart.label(center, label, step)
        for i, (name, value) in enumerate((name, group[name]) for name in series if name in group):
            place = series.index(name)
            x = center if stacked else center + width * (i + 0.5 - len(group) / 2)
            top, bottom = chart.y(base + value[0]), chart.y(base)
            size = f'width="{width - 2:.1f}" height="{bottom - top:.1f}"'
            chart.draw(f'<rect class="fill{place}" x="{x - width / 2 + 1:.1f}" y="{top:.1f}" {size}/>')
            if stacked:
                base += value[0]
                continue
            chart.interval(x, value)
            if width >= 28:
                chart.text(x, chart.y(value[2]) - 4, f"{value[0]:.2f}")
    return chart.file()


def lines(title: str, series: Mapping[str, Mapping[float, Value]], x_label: str, reference: float | None = None) -> str:
    """Lines through points with their intervals; the vertical axis starts at zero if values come near it.

    Args:
        title: what is drawn, and its unit.
        series: values by their place on the horizontal axis, by name.
        x_label: names the horizontal axis.
        reference: a value at which a dashed line stands.
    """
    ends = [end for points in series.values() for value in points.values() for end in _interval(value)]
    ends += [] if reference is None else [reference]
    chart = _Chart(title, list(series), 0.0 if 2 * min(ends) < max(ends) else min(ends), max(ends), reference)
    places = sorted({place for points in series.values() for place in points})
    scale = (RIGHT - LEFT - 60) / ((places[-1] - places[0]) or 1)
    for place in places if len(places) <= 12 else filter(places[0].__le__, _ticks(places[0], places[-1])):
        chart.label(LEFT + 30 + (place - places[0]) * scale, f"{place:g}", 60)
    chart.text((LEFT + RIGHT) / 2, HEIGHT - 10, x_label)
    for i, points in enumerate(series.values()):
        values = [(LEFT + 30 + (place - places[0]) * scale, _interval(points[place])) for place in sorted(points)]
        corners = " ".join(f"{x:.1f},{chart.y(value[0]):.1f}" for x, value in values)
        chart.draw(f'<polyline class="line{i}" points="{corners}"/>')
        for x, value in values if len(places) <= 40 else ():
            chart.interval(x, value)
            chart.draw(f'<circle class="fill{i}" cx="{x:.1f}" cy="{chart.y(value[0]):.1f}" r="4"/>')
    return chart.file()


class _Chart:
    """The frame of a chart (title, legend, vertical axis), and what is drawn into it."""

    def __init__(self, title: str, series: Sequence[str], low: float, high: float, reference: float | None) -> None:
        ticks = _ticks(low, high)
        self.low, self.high = ticks[0], ticks[-1]
        self.elements, x = [f'<text class="title" x="8" y="18">{escape(title)}</text>'], 8.0
        for i, name in enumerate(series) if len(series) > 1 else ():
            self.draw(f'<rect class="fill{i}" x="{x:.1f}" y="31" width="10" height="10"/>')
            self.text(x + 15, 40, name, "start")
            x += 34 + 6.4 * len(name)
        for tick in ticks:
            self._across("grid" if tick else "axis", tick)
            self.text(LEFT - 6, self.y(tick) + 4, f"{tick:g}", "end")
        if reference is not None:
            self._across("reference", reference)

    def y(self, value: float) -> float:
        """The vertical coordinate of a value."""
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def draw(self, element: str) -> None:
        self.elements.append(element)

    def _across(self, kind: str, value: float) -> None:
        self.draw(f'<path class="{kind}" d="M{LEFT} {self.y(value):.1f}H{RIGHT}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.draw(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def label(self, x: float, text: str, width: float) -> None:
        """A label below the horizontal axis, on up to two lines."""
        for i, line in enumerate(wrap(text, max(4, int(width / 6.4)))[:2]):
            self.text(x, BOTTOM + 16 + 14 * i, line)

    def interval(self, x: float, value: tuple[float, float, float]) -> None:
        low, high = self.y(value[1]), self.y(value[2])
        if low > high:
            self.draw(f'<path class="axis" d="M{x - 3:.1f} {high:.1f}h6m-3 0V{low:.1f}m-3 0h6"/>')

    def file(self) -> str:
        """The text of the file."""
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>'
        return "\n".join([head, *self.elements, "</svg>\n"])


def _interval(value: Value) -> tuple[float, float, float]:
    return value if isinstance(value, tuple) else (value, value, value)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, four to ten steps."""
    span = high - low or abs(high) or 1.0
    size = 10.0 ** floor(log10(span / 4))
    size *= max(factor for factor in (1, 2, 2.5, 5) if factor * size * 4 <= span * 1.0001)
    first, last = floor(low / size + 1e-9), ceil(high / size - 1e-9)
    return [round(size * i, 12) for i in range(first, max(last, first + 1) + 1)]
