# SPDX-License-Identifier: Apache-2.0
"""The closed loop: who is beside whom, what pairs of turns come to, and a run with engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.closed_loop import VERIFYING, Pair, SideBySide, Steps, between, line_up, paired
from vllm_ppd.benchmarks.decode.closed_loop_table import rows_of
from vllm_ppd.benchmarks.decode.options import ClosedLoopOptions
from vllm_ppd.benchmarks.decode.run import loads_of
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.engine import share_weights
from vllm_ppd.benchmarks.harness.estimates import joined
from vllm_ppd.benchmarks.harness.machine import RETRIES, Stolen, undisturbed
from vllm_ppd.benchmarks.harness.results import Measured, all_runs, stored

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]


def options(**changes: Any) -> ClosedLoopOptions:
    return ClosedLoopOptions(**{"model": "model", "data": ("prompts.jsonl",), **changes})


def measured(cells: dict[tuple[float, int], dict[str, list[Pair]]], steps: int = 10) -> list[Measured]:
    """What a file would hold that has these pairs."""
    runs: dict[float, dict[str, Any]] = {}
    for (temperature, batch), pairs in cells.items():
        run = runs.setdefault(
            temperature, {"options": {"temperature": temperature, "steps": steps}, "contenders": {}, "turns": []}
        )
        for name, own in pairs.items():
            run["contenders"][name] = {}
            run["turns"] += [{"contender": name, "batch": batch, **pair._asdict()} for pair in own]
    return [Measured(run, [], run["contenders"]) for run in runs.values()]


def test_pairs_are_held_against_vllms_own_of_the_same_time() -> None:
    """The machine is half as fast in the second pair, and no ratio cares: 20 tokens of vLLM's, then 25."""
    pairs = {
        BASE: [Pair(20, 1.0, 0, 40, 2.0), Pair(20, 2.0, 0, 40, 4.0)],
        "cp": [Pair(30, 1.0, 8, 40, 2.0), Pair(20, 2.5, 2, 40, 4.0)],
    }
    base, cp, *all_cells = rows_of(measured({(0.8, 2): pairs}))
    assert (base["overall"], base["overall, interval"]) == (1.0, "1.000-1.000")
    assert (cp["temperature"], cp["batch"], cp["pairs"]) == (0.8, 2, 2)
    assert (base["drafting"], cp["drafting"]) == (0.0, 0.25)
    assert cp["overall"] == round(50 / 45, 3)
    assert cp["overall, interval"] == "0.800-1.500"  # either pair twice
    assert [(row["contender"], row["overall"]) for row in all_cells] == [(BASE, 1.0), ("cp", cp["overall"])]


def test_cells_of_a_batch_size_or_a_temperature_are_joined() -> None:
    """One that is alone has a row already, and so have all."""
    cells = [(0.8, 1), (0.8, 2), (0.0, 1)]
    assert joined(cells) == [
        ("all", 1, [(0.8, 1), (0.0, 1)]),
        (0.8, "all", [(0.8, 1), (0.8, 2)]),
        ("all", "all", cells),
    ]
    assert joined(cells[:2]) == [("all", "all", cells[:2])]
    speeds = {(0.8, 1): 20, (0.8, 2): 40, (0.0, 1): 80, (0.0, 2): 10}
    pairs = {cell: {"cp": [Pair(tokens, 1.0, 0, 40, 2.0)]} for cell, tokens in speeds.items()}
    found = {(row["temperature"], row["batch"]): row["overall"] for row in rows_of(measured(pairs))[len(pairs) :]}
    assert found == {
        ("all", 1): 2.0, ("all", 2): 1.0, (0.8, "all"): pytest.approx(2**0.5, abs=1e-3),
        (0.0, "all"): pytest.approx(2**0.5, abs=1e-3), ("all", "all"): pytest.approx(2**0.5, abs=1e-3),
    }  # fmt: skip


def test_cells_are_drawn_apart_from_each_other() -> None:
    """What all cells say together varies less than a cell alone: its draws are not those of the others."""
    pairs = {"cp": [Pair(10 + 3 * i, 1.0, 0, 40, 2.0) for i in range(8)]}
    found = rows_of(measured({(t, 1): pairs for t in (0.0, 0.5, 0.8, 1.0)}))
    widths = [high - low for low, high in (map(float, row["overall, interval"].split("-")) for row in found)]
    assert widths[-1] == pytest.approx(widths[0] / 2, rel=0.15)


def test_who_is_lined_up() -> None:
    """One engine of vLLM alone more than there are contenders; --always is for ours."""
    cp = str(DEMO.parent / "heads" / "cp")
    plain, others = line_up(options(heads=(cp,), plain="ngram", always=True, verified=4))
    assert [one.name for one in plain] == [BASE, CONTROL, "vLLM, 3", "vLLM, 4"]
    assert [one.name for one in others] == ["cp", "ngram", VERIFYING]
    assert others[0].speculative_config == {"model": cp, "adaptive": False}
    assert "adaptive" not in (others[1].speculative_config or {})
    assert others[2].engine == {"max_num_seqs": 32}
    with pytest.raises(BenchError, match="nobody is compared with vLLM alone; give heads folders with --heads"):
        line_up(options())
    with pytest.raises(ValueError, match="does not fit --new-tokens"):
        options(steps=32, new_tokens=64)


def test_a_turn_is_held_against_those_beside_it() -> None:
    """Each of two contenders is between two of vLLM alone, and all engines have two turns."""
    others, plain = ([Contender(name) for name in names] for names in (("cp", "early"), (BASE, CONTROL, "vLLM, 3")))

    def names(first: int) -> list[str]:
        return [one.name for one in between(others, plain, first)]

    assert names(0) == [BASE, "cp", CONTROL, "early", "vLLM, 3"]
    assert names(1) == [CONTROL, "early", "vLLM, 3", "cp", BASE]
    assert names(2) == ["vLLM, 3", "cp", BASE, "early", CONTROL]
    seconds = {BASE: 1.0, CONTROL: 3.0, "vLLM, 3": 4.0, "cp": 5.0, "early": 7.0}
    there = names(0)
    taken = [(name, Steps(10, seconds[name] + i / 100, 2)) for i, name in enumerate([*there, *reversed(there)])]
    found = paired(taken, {one.name for one in plain})
    assert found["cp"] == Pair(20, 10.09, 4, 40, pytest.approx(8.18))  # turns 1 and 8, between BASE and CONTROL
    assert found["early"] == Pair(20, 14.09, 4, 40, pytest.approx(14.18))
    every = pytest.approx(16.27)
    assert found[BASE] == Pair(20, pytest.approx(2.09), 4, 60, every)
    assert found[CONTROL] == Pair(20, pytest.approx(6.09), 4, 60, every)


@pytest.mark.parametrize(
    ("shares", "found", "tries"),
    [
        ([0, 0.01], [1], 1),
        ([0.5, 0.03, 0, 0.02], [1, 2], 2),
        ([0, 0, 0, 0], [None, 2], 2),  # a request ended within the first
        ([0.03] * 2 * (1 + RETRIES), list(range(1 + RETRIES)), None),
    ],
)
def test_runs_in_which_others_had_the_machine_are_repeated(
    shares: list[float], found: list[Any], tries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, runs = iter(shares), iter(found)
    monkeypatch.setattr(Stolen, "share", lambda _: next(left))
    assert undisturbed(0.02, lambda: next(runs)) == tries
    assert next(left, None) is None


def test_share_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from psutil import _pslinux

    said = iter([(10, 0, 10, 80, 0, 0, 0, 5, 0, 0), (50, 0, 20, 100, 0, 0, 0, 30, 7, 7)])
    monkeypatch.setattr("psutil.cpu_times", lambda: _pslinux.scputimes(*next(said)))
    assert Stolen().share() == pytest.approx(25 / 95)


@pytest.mark.engine
def test_engines_take_turns(tiny_model: Callable[..., Path], heads_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Two rounds, each of another text, with drafts in every step."""
    prompts, out, heads = tmp_path / "prompts.jsonl", tmp_path / "loop.json", heads_folder()
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [7 * i + 3, 40, 3, 9]}) + "\n" for i in range(9)))
    command = [*PPD, "bench", "closed-loop", "--model", str(tiny_model()), "--heads", str(heads), "--data"]
    command += [str(prompts), "--batch-sizes", "2", "--temperatures", "0", "--always", "--eager"]
    command += ["--dtype", "float32", "--kv-cache-gib", "0.03", "--warm-up", "4", "--steps", "4", "--new-tokens", "64"]
    command += ["--rounds-a-text", "1", "--rounds", "2", "--most-stolen", "1", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    (found,) = stored(out)
    turns, ours = found.run["turns"], f"ppd {heads.name}"
    assert [turn["contender"] for turn in turns] == [BASE, ours, CONTROL, CONTROL, ours, BASE]
    drafted = [turn for turn in turns if turn["contender"] == ours]
    assert all(turn["drafting"] == 2 * 4 and turn["tokens"] >= 2 * 2 * 4 for turn in drafted)
    assert all(turn["plain_tokens"] == 2 * 2 * 2 * 4 for turn in drafted)
    row = next(row for row in rows_of([found]) if row["contender"] == ours)
    assert (row["pairs"], row["drafting"]) == (2, 1.0)


class Batch:
    """Takes prompts in."""

    def __init__(self, name: str) -> None:
        self.name, self.taken = name, [[0]]

    def begin(self, prompts: list[list[int]], tokens: int, temperature: float) -> None:
        self.taken = prompts


def test_texts_of_a_further_run(tmp_path: Path) -> None:
    """A further run goes on with the texts; several requests have the same one."""
    made = options(out=str(tmp_path / "loop.json"), rounds_a_text=2, verified=4, temperatures="0", batch_sizes="1")
    plain, others = line_up(made)
    for rounds in (2, 0):
        runs = all_runs(made, [*plain, *others])
        for number in range(rounds):
            runs[0].add({"contender": BASE, "batch": 1, "group": 0, "round": number})
    session = SideBySide(made, loads_of(made, runs), plain, others, [[10], [11], [12]])
    (load,) = session.loads
    one: Any = Batch(VERIFYING)
    for number, text in ((0, 11), (1, 11), (2, 12), (4, 10)):
        session.begin(one, load, number)
        assert one.taken == [[text]] * 4
    one.name = BASE
    session.begin(one, load, 0)
    assert one.taken == [[11]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_engines_of_a_process_read_one_copy_of_equal_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    """On the CPU: how fast a product is depends on the memory that its matrix happened to get."""
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        pytest.skip("this build of vLLM packs no weights")
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", _custom_ops.create_onednn_mm)
    share_weights()
    share_weights()
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
