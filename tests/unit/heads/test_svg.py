# SPDX-License-Identifier: Apache-2.0
"""Charts: what a reader would measure in them with a ruler."""

import re
from xml.etree import ElementTree

import pytest

from vllm_ppd.heads.svg import DARK, bars, lines

NAMESPACE = "{http://www.w3.org/2000/svg}"


def elements(chart: str, tag: str, kind: str) -> list[dict[str, str]]:
    return [
        e.attrib for e in ElementTree.fromstring(chart).iter(NAMESPACE + tag) if e.get("class", "").startswith(kind)
    ]


def heights(chart: str) -> list[float]:
    return [float(bar["height"]) for bar in elements(chart, "rect", "fill") if float(bar["y"]) != 31]  # legends apart


def test_bars_are_as_high_as_their_values_in_groups_that_lack_some() -> None:
    chart = bars("a < b", {"batch 1": {"cp": (1.5, 1.2, 1.6), "early": 0.5}, "batch 4": {"early": 1.0}}, reference=1.0)
    cp, early, alone = heights(chart)
    assert cp == pytest.approx(3 * early, abs=0.2) and alone == pytest.approx(2 * early, abs=0.2)
    interval = next(path for path in elements(chart, "path", "axis") if "v" in path["d"].lower())
    high, low = (float(value) for value in re.findall(r"M\S+ (\S+)h.*V([\d.]+)m", interval["d"])[0])
    assert (low - high) / cp == pytest.approx((1.6 - 1.2) / 1.5, abs=0.01)


def test_stacked_bars_stand_on_each_other() -> None:
    first, second = elements(bars("ms", {"cp": {"verify": 25.0, "draft": 5.0}}, stacked=True), "rect", "fill")[-2:]
    assert float(second["y"]) + float(second["height"]) == pytest.approx(float(first["y"]), abs=0.2)


@pytest.mark.parametrize("places", [2, 60])
def test_lines_go_through_their_points(places: int) -> None:
    chart = lines("loss", {"cp": {float(at): 5 - at / places for at in range(places)}}, "step")
    (line,) = elements(chart, "polyline", "line0")
    ys = [float(corner.split(",")[1]) for corner in line["points"].split()]
    assert len(ys) == places and ys == sorted(ys)


@pytest.mark.parametrize("chart", [bars("no bar", {"cp": {"a": 0.0}}), lines("flat", {"cp": {1: 2.0, 2: 2.0}}, "k")])
def test_charts_without_any_height_are_drawn_in_both_themes(chart: str) -> None:
    assert ElementTree.fromstring(chart).tag == f"{NAMESPACE}svg" and "nan" not in chart
    assert all(color in chart.partition("prefers-color-scheme:dark")[2] for color in DARK)
