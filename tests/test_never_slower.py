# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/never_slower.py makes of its pairs of turns, and that the kept rows are those of the kept pairs."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from never_slower import BASE, CONTROL, rows


def test_pairs_are_held_against_vllms_own_of_the_same_time() -> None:
    """The machine is half as fast in the second pair, and no ratio cares: 20 tokens of vLLM's, then 25."""
    pairs = {
        BASE: [(20, 1.0, 0), (20, 2.0, 0)],
        CONTROL: [(20, 1.0, 0), (20, 2.0, 0)],
        "cp": [(30, 1.0, 8), (20, 2.5, 2)],
    }
    base, _, cp, *all_cells = rows({"0.8/2": pairs}, steps=10)
    assert (base["overall"], base["median"], base["quartiles"]) == (1.0, 1.0, "1.000-1.000")
    assert (cp["temperature"], cp["batch"], cp["pairs"]) == (0.8, 2, 2)
    assert (base["drafting"], cp["drafting"]) == (0.0, 0.25)
    assert cp["overall"] == round(50 / 45, 3)
    assert cp["interval"] == "0.800-1.500"  # either pair twice
    assert (cp["median"], cp["quartiles"]) == (1.15, "0.975-1.325")
    assert [(row["contender"], row["overall"]) for row in all_cells] == [
        (BASE, 1.0),
        (CONTROL, 1.0),
        ("cp", cp["overall"]),
    ]


def test_either_of_vllms_engines_is_held_against_both() -> None:
    first, second, *_ = rows({"0.0/1": {BASE: [(20, 1.0, 0)], CONTROL: [(20, 3.0, 0)]}}, steps=10)
    assert (first["overall"], second["overall"]) == (2.0, round(20 / 3 / 10, 3))


def test_cells_are_drawn_apart_from_each_other() -> None:
    """What all cells say together varies less than a cell alone: its draws are not those of the others."""
    pairs = {name: [(20, 1.0, 0)] * 8 for name in (BASE, CONTROL)} | {"cp": [(10 + 3 * i, 1.0, 0) for i in range(8)]}
    found = [row for row in rows({f"{t}/1": pairs for t in (0.0, 0.5, 0.8, 1.0)}, steps=10) if row["contender"] == "cp"]
    widths = [high - low for low, high in (map(float, row["interval"].split("-")) for row in found)]
    assert widths[-1] == pytest.approx(widths[0] / 2, rel=0.15)


def test_kept_rows() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "never_slower.json").read_text())
    assert rows(kept["cells"], int(kept["settings"]["steps"])) == kept["rows"]
