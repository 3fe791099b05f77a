# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/never_slower.py makes of its pairs of turns, and that the kept rows are those of the kept pairs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from never_slower import rows
from side_by_side import (
    BASE,
    CONTROL,
    RETAKEN,
    Pair,
    Stolen,
    Turn,
    between,
    in_turns,
    joined,
    pack_once,
    paired,
    plain_names,
    started,
    undisturbed,
)
from tqdm import tqdm


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


def test_cells_of_a_batch_size_or_a_temperature_are_joined() -> None:
    """By the name of a cell; one that is alone has a row already, and so have all."""
    cells = ["0.8/1", "0.8/2", "0.0/1"]
    of_batch, of_temperature = ("all", "1", ["0.8/1", "0.0/1"]), (0.8, "all", ["0.8/1", "0.8/2"])
    assert joined(cells) == [of_batch, of_temperature, ("all", "all", cells)]
    assert joined(["0.8/1", "0.8/2"]) == [("all", "all", ["0.8/1", "0.8/2"])]
    speeds = {"0.8/1": 20, "0.8/2": 40, "0.0/1": 80, "0.0/2": 10}
    pairs = {cell: {"cp": [Pair(tokens, 1.0, 0, 40, 2.0)]} for cell, tokens in speeds.items()}
    found = {(row["temperature"], row["batch"]): row["overall"] for row in rows(pairs, steps=10)[len(pairs) :]}
    assert found == {
        ("all", 1): 2.0, ("all", 2): 1.0, (0.8, "all"): pytest.approx(2**0.5, abs=1e-3),
        (0.0, "all"): pytest.approx(2**0.5, abs=1e-3), ("all", "all"): pytest.approx(2**0.5, abs=1e-3),
    }  # fmt: skip


def test_engines_are_started_in_another_order_than_they_are_told_in() -> None:
    begun: list[str] = []
    found = started([BASE, CONTROL, "cp"], between(["cp"], [BASE, CONTROL], 0), lambda name: begun.append(name) or name)
    assert begun == [BASE, "cp", CONTROL]
    assert list(found.items()) == [(BASE, BASE), (CONTROL, CONTROL), ("cp", "cp")]


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


class Engine:
    """Takes its turns at once."""

    whole = True

    def begin(self, *_: Any) -> None:
        pass

    def turn(self, steps: int) -> Turn:
        return Turn(steps, 1.0)


@pytest.mark.parametrize(("disturbed", "kept"), [([], 4), ([1, 2, 5], 4), (range(2, 99), 2)])
def test_pairs_in_which_others_had_the_machine_are_taken_anew(
    disturbed: Any, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def share(_: Stolen) -> float:  # before a pair, and after it
        asked.append(0)
        return 0.03 if (len(asked) - 1) // 2 in disturbed else 0.01

    monkeypatch.setattr(Stolen, "share", share)
    engines: Any = {name: Engine() for name in (*plain_names(1), "cp")}
    bar = tqdm(total=4, file=io.StringIO())
    found = in_turns(engines, {name: [[1]] for name in engines}, 0.8, 4, 6, 0, bar, 0.02)
    assert {name: len(pairs) for name, pairs in found.items()} == dict.fromkeys(engines, kept)
    assert len(asked) == 2 * (kept + (len(disturbed) if kept == 4 else RETAKEN * 4))
    assert bar.n == 4


@pytest.mark.parametrize(("shares", "tries"), [([0, 0.01], 1), ([0.5, 0.03, 0, 0.02], 2), ([0.03] * 8, None)])
def test_runs_in_which_others_had_the_machine_are_made_anew(
    shares: list[float], tries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, runs = iter(shares), iter(range(1, 9))
    monkeypatch.setattr(Stolen, "share", lambda _: next(left))
    assert undisturbed(0.02, lambda: next(runs)) == tries
    assert next(left, None) is None


def test_share_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["cpu 10 0 10 80 0 0 0 5 0 0", "cpu 50 0 20 100 0 0 0 30 7 7"])
    monkeypatch.setattr(Path, "read_text", lambda _: next(said) + "\ncpu0 1 1 1 1 1 1 1 1 1 1")
    assert Stolen().share() == pytest.approx(25 / 95)


def test_cells_are_drawn_apart_from_each_other() -> None:
    """What all cells say together varies less than a cell alone: its draws are not those of the others."""
    pairs = {"cp": [Pair(10 + 3 * i, 1.0, 0, 40, 2.0) for i in range(8)]}
    found = [row for row in rows({f"{t}/1": pairs for t in (0.0, 0.5, 0.8, 1.0)}, steps=10) if row["contender"] == "cp"]
    widths = [high - low for low, high in (map(float, row["interval"].split("-")) for row in found)]
    assert widths[-1] == pytest.approx(widths[0] / 2, rel=0.15)


def test_kept_rows() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "never_slower.json").read_text())
    assert rows(kept["cells"], int(kept["settings"]["steps"])) == kept["rows"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_engines_of_a_process_read_one_copy_of_equal_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    """On the CPU: how fast a product is depends on the memory that its matrix happened to get."""
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        pytest.skip("this build of vLLM packs no weights")
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", _custom_ops.create_onednn_mm)
    pack_once()
    pack_once()
    weight = torch.randn(64, 32).to(dtype)
    try:
        _custom_ops.create_onednn_mm(weight.t(), 32)
    except RuntimeError:
        assert dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert str(dtype) in capsys.readouterr().out
        pytest.skip("oneDNN multiplies bfloat16 with AVX-512 or AMX alone, which this processor lacks")
    first, second = (_custom_ops.create_onednn_mm(one.t(), 32) for one in (weight, weight.clone()))
    other = _custom_ops.create_onednn_mm((weight + 1).t(), 32)
    assert first is second and first is not other
    inputs = torch.randn(3, 32).to(dtype)
    for handler, matrix in ((second, weight), (other, weight + 1)):
        torch.testing.assert_close(_custom_ops.onednn_mm(handler, inputs, None), inputs @ matrix.t())
