# SPDX-License-Identifier: Apache-2.0
"""benchmarks/price_error.py: its script drafts and stops as it says, and it finds prices that are known."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import price_error
from price_error import PLAIN, Script, Step, compared, row, rows, runs_of

from vllm_ppd.vllm_plugins.adaptive.drafts import SETTLING, AdaptiveDrafts


def steps_at(price: float, times: int = 20, drafting: int = 60, noise: float = 0.03) -> list[Step]:
    """Of two drafts each, at batch 1, on a machine whose speed drifts."""
    generator, seconds, found = np.random.default_rng(0), 0.01, []
    for _ in range(times):
        for drafts, count in ((2, drafting), (0, PLAIN - SETTLING)):
            for _ in range(count):
                seconds *= math.exp(generator.normal(0, 0.01))
                found.append((0, drafts, seconds * (price if drafts else 1.0) * math.exp(generator.normal(0, noise))))
    return found


@pytest.mark.parametrize("price", [1.1, 1.6])
def test_a_price_is_found_though_the_machine_drifts(price: float) -> None:
    found = row("cp/0.8/1", 3, [steps_at(price)])
    assert (found["heads"], found["temperature"], found["batch"], found["comparisons"]) == ("cp", 0.8, 1, 19)
    assert found["price"] == pytest.approx(price, rel=0.03)
    assert found["error"] < 0.05  # of a log: where nothing is known, drafts are held to cost nothing
    assert 0 < found["claimed"] < 0.05


def test_an_error_is_what_the_filter_is_off_by() -> None:
    """Steps whose price is another in the second half: the filter is late, and off by some of the difference."""
    steady = row("cp/0/1", 3, [steps_at(1.2)])["error"]
    changed = [*steps_at(1.2, times=9), *steps_at(1.6, times=11)]
    assert row("cp/0/1", 3, [changed])["error"] > 2 * steady


def test_only_neighbours_are_compared() -> None:
    """A run without drafts at the beginning or end has one neighbour, and one of another batch size is none."""
    steps = [(0, 0, 1.0), (0, 2, 3.0), (0, 0, 2.0), (0, 2, 3.0), (1, 0, 1.0)]
    assert list(compared(runs_of(steps))) == [math.log(1.5)]


def test_the_script_drafts_whatever_pays() -> None:
    """Nothing is ever accepted; two of three steps draft all the same, and steps are timed as always."""
    adaptive = AdaptiveDrafts(2)
    script, drafted, now = Script(adaptive, drafting=12), [], 0.0
    allowed, kinds, fixed = np.array([2]), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool)
    for _ in range(5 * (12 + PLAIN)):
        adaptive.observe(["a"], np.array([1]), now, decoding=True)
        drafts = adaptive.choose(allowed, 1, kinds, fixed)
        drafted.append(int(drafts[0]))
        now += 0.015 if drafts[0] else 0.01
    runs = runs_of(script.taken)
    assert drafted.count(2) == 5 * 12 and drafted.count(0) == 5 * PLAIN
    assert {(run[0][1], len(run)) for run in runs[1:-1]} == {(2, 11), (0, PLAIN - SETTLING)}
    assert next(compared(runs)) == pytest.approx(math.log(1.5))
    assert not adaptive.resting


def test_kept_steps_are_replayed_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {"cp/0.8/1": {"most": 3, "parts": [steps_at(1.3), steps_at(1.3)]}}
    (tmp_path / "kept.json").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(sys, "argv", ["price_error.py", "--replay", str(tmp_path / "kept.json")])
    price_error.main()
    shown = capsys.readouterr().out
    one, whole = rows(cells)
    assert f" {one['price']} " in shown and (one["comparisons"], whole["comparisons"]) == (38, 38)
