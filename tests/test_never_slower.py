# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/never_slower.py makes of its pairs of turns, and that the kept rows are those of the kept pairs."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from never_slower import rows
from side_by_side import BASE, CONTROL, Pair, Turn, between, paired, plain_names


def test_pairs_are_held_against_vllms_own_of_the_same_time() -> None:
    """The machine is half as fast in the second pair, and no ratio cares: 20 tokens of vLLM's, then 25."""
    pairs = {
        BASE: [Pair(20, 1.0, 0, 40, 2.0), Pair(20, 2.0, 0, 40, 4.0)],
        "cp": [Pair(30, 1.0, 8, 40, 2.0), Pair(20, 2.5, 2, 40, 4.0)],
    }
    base, cp, *all_cells = rows({"0.8/2": pairs}, steps=10)
    assert (base["overall"], base["median"], base["quartiles"]) == (1.0, 1.0, "1.000-1.000")
    assert (cp["temperature"], cp["batch"], cp["pairs"]) == (0.8, 2, 2)
    assert (base["drafting"], cp["drafting"]) == (0.0, 0.25)
    assert cp["overall"] == round(50 / 45, 3)
    assert cp["interval"] == "0.800-1.500"  # either pair twice
    assert (cp["median"], cp["quartiles"]) == (1.15, "0.975-1.325")
    assert [(row["contender"], row["overall"]) for row in all_cells] == [(BASE, 1.0), ("cp", cp["overall"])]


def test_a_turn_is_held_against_those_beside_it() -> None:
    """Each of two contenders is between two of vLLM alone, and all engines have two turns."""
    others, plain = ["cp", "early"], list(plain_names(2))
    assert plain == [BASE, CONTROL, "vLLM, 3"]
    assert between(others, plain, 0) == [BASE, "cp", CONTROL, "early", "vLLM, 3"]
    assert between(others, plain, 1) == [CONTROL, "early", "vLLM, 3", "cp", BASE]
    assert between(others, plain, 2) == ["vLLM, 3", "cp", BASE, "early", CONTROL]
    seconds = {BASE: 1.0, CONTROL: 3.0, "vLLM, 3": 4.0, "cp": 5.0, "early": 7.0}
    there = between(others, plain, 0)
    taken = [(name, Turn(10, seconds[name] + i / 100, 2)) for i, name in enumerate([*there, *reversed(there)])]
    found = paired(taken, plain)
    assert found["cp"] == Pair(20, 10.09, 4, 40, pytest.approx(8.18))  # turns 1 and 8, between BASE and CONTROL
    assert found["early"] == Pair(20, 14.09, 4, 40, pytest.approx(14.18))
    every = pytest.approx(16.27)
    assert found[BASE] == Pair(20, pytest.approx(2.09), 4, 60, every)
    assert found[CONTROL] == Pair(20, pytest.approx(6.09), 4, 60, every)


def test_cells_are_drawn_apart_from_each_other() -> None:
    """What all cells say together varies less than a cell alone: its draws are not those of the others."""
    pairs = {"cp": [Pair(10 + 3 * i, 1.0, 0, 40, 2.0) for i in range(8)]}
    found = [row for row in rows({f"{t}/1": pairs for t in (0.0, 0.5, 0.8, 1.0)}, steps=10) if row["contender"] == "cp"]
    widths = [high - low for low, high in (map(float, row["interval"].split("-")) for row in found)]
    assert widths[-1] == pytest.approx(widths[0] / 2, rel=0.15)


def test_kept_rows() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "never_slower.json").read_text())
    assert rows(kept["cells"], int(kept["settings"]["steps"])) == kept["rows"]
