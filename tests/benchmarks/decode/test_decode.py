# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: contenders on a tiny model, stopped and started again; its table, groups and predictions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory, cells_of

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode import group
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.table import rows_of, summarise, table
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, contenders
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.vllm_plugins.cli.main import main

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]


def options(**changes: Any) -> DecodeOptions:
    return DecodeOptions(**{"model": "model", "data": ("prompts.jsonl",), "plain": "none", **changes})


@pytest.fixture
def command(tiny_model: Factory, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": [(7 * i + j * j) % 250 + 2 for j in range(20 + i % 4)]} for i in range(16)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model": tiny_model(), "data": prompts, "plain": "none", "batch-sizes": "1,3", "prompt-tokens": 24,
        "new-tokens": 24, "dtype": "float32", "kv-cache-gib": 0.05, "out": tmp_path / "bench.json",
    }  # fmt: skip
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return ["bench", "decode", "--eager", *flags]


ALWAYS = 'ppd={"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 2, "adaptive": false}'


def run_of(folder: Path) -> dict[str, Any]:
    path = folder / "bench.json"
    return json.loads(path.read_text())["runs"][0] if path.exists() else {"turns": []}


@pytest.mark.engine
@pytest.mark.full
def test_turns_of_a_run_that_is_stopped(command: list[str], tmp_path: Path) -> None:
    """Every turn is written, in order; the method says what the base says."""
    command += ["--rounds", "300", "--batch-sizes", "3,1", "--also", 'vLLM, again={"shares": "vLLM"}', ALWAYS]
    process = subprocess.Popen([*PPD, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(run_of(tmp_path)["turns"]) < 6 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    run = run_of(tmp_path)
    turns = run["turns"]
    assert process.returncode == 130, errors
    assert f"ppd: stopped; {len(turns)} turns are kept in {tmp_path / 'bench.json'}" in errors
    assert not run["finished"]
    order = [(t["batch"], t["round"], t["contender"]) for t in turns]
    assert order == [(3, r, c) for r in range(300) for c in (BASE, CONTROL, "ppd")][: len(turns)]
    for turn in turns:
        assert turn["same_tokens"] == turn["compared_tokens"] == 24 * 3
        assert (turn["draft_seconds"] > 0) == (turn["draft_tokens"] > 0) == (turn["contender"] == "ppd")
        assert turn["draft_seconds"] < turn["worker_seconds"] < turn["window_seconds"]
        # A window holds neither the first token of all nor what the others still say when the first has ended.
        assert turn["steps"] * 3 <= turn["window_tokens"] <= 23 * 3
        assert "token_ids" not in turn
        lengths = turn["accepted_lengths"]
        assert sum(lengths) == turn["drafts"]
        assert sum(length * drafts for length, drafts in enumerate(lengths)) == turn["accepted_tokens"]
    starts = run["starts"]
    assert set(starts) == {BASE, CONTROL, "ppd"} and all(s["seconds"] > 0 < s["peak_bytes"] for s in starts.values())


@pytest.mark.engine
def test_turns_of_a_few_steps(command: list[str], tmp_path: Path) -> None:
    """All engines make as many timed steps, up to the first request that ends; its text is that of the base so far."""
    assert main([*command, "--batch-sizes", "3", "--rounds", "2", "--turn-steps", "3", "--also", ALWAYS]) == 0
    run = run_of(tmp_path)
    assert [turn["contender"] for turn in run["turns"]] == [BASE, CONTROL, "ppd"] * 2
    for first in (0, 3):
        base, control, ours = run["turns"][first : first + 3]
        assert base["steps"] == control["steps"] and 0 <= base["steps"] - ours["steps"] <= 3
        # Each turn has a step that is not timed.
        assert base["window_tokens"] == 3 * base["steps"] and base["steps"] < 23 * 3 / 4 + 3
        assert all(0 < turn["same_tokens"] == turn["compared_tokens"] <= 24 * 3 for turn in (base, control, ours))
        assert control["compared_tokens"] == base["compared_tokens"]


@pytest.mark.full
@pytest.mark.engine
def test_samples_of_vllms_own_methods_are_mended(command: list[str], tmp_path: Path) -> None:
    """Temperature 0.01 is as good as greedy; with sampling parameters dropped, one draft in a hundred is accepted."""
    command += ["--rounds", "1", "--batch-sizes", "3", "--new-tokens", "160", "--prompt-tokens", "24", "--temperature"]
    assert main([*command, "0.01", "--plain", "ngram", "--traces", "vLLM"]) == 0
    assert (tmp_path / "bench-vLLM-batch-3-temperature-0.01.json.gz").exists()
    (turn,) = (turn for turn in run_of(tmp_path)["turns"] if turn["contender"] == "ngram")
    assert turn["compared_tokens"] == 0
    assert turn["draft_tokens"] > 50
    # Greedy, a third is on this model.
    assert turn["accepted_tokens"] > 0.25 * turn["draft_tokens"]


@pytest.mark.engine
def test_base_that_does_not_start(command: list[str], capfd: Any) -> None:
    """One line, and no process left."""
    assert main([*command, "--kv-cache-gib", "0.001", "--batch-sizes", "16"]) == 2
    assert "KV cache" in capfd.readouterr().err.splitlines()[-1]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [line for line in commands if b"spawn_main" in line]


def a_turn(contender: str, number: int, tokens: int, seconds: float, **changes: Any) -> dict[str, Any]:
    zero = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "repeated_4_grams", "all_4_grams"), 0)
    return {
        "contender": contender, "batch": 2, "group": 0, "round": number, "window_tokens": tokens, "steps": 10,
        "window_seconds": seconds, "step_seconds": seconds / 10, "worker_seconds": seconds / 2, "draft_seconds": 0.0,
        "same_tokens": 9, "compared_tokens": 10, "peak_bytes": 5, **zero, **changes,
    }  # fmt: skip


def results_of(folder: Path, *turns: dict[str, Any], **changes: Any) -> Results:
    made = options(out=str(folder / "bench.json"), **changes)
    results = Results(made, group.contenders(made) if made.group else contenders(made))
    for each in turns:
        results.add(each)
    return results


def test_ratios_are_paired_by_round(tmp_path: Path) -> None:
    """The machine is twice as slow in round 1; the ratio does not care, the median of tokens a second does."""
    drafted = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15, "draft_seconds": 0.1}
    ours = a_turn("a", 0, 30, 1.0, **drafted), a_turn("a", 1, 30, 2.0)
    turns = a_turn(BASE, 0, 20, 1.0), a_turn(BASE, 1, 20, 2.0), *ours
    results = results_of(tmp_path, *turns, also=('a={"method": "ppd"}',))
    row = summarise(results, "a", 2)
    assert row is not None
    assert row["speed_up"] == pytest.approx((1.5, 1.5, 1.5))
    assert row["tokens_per_second"] == pytest.approx((22.5, 18.75, 26.25))
    assert (row["length"], row["rate"], row["consistency"]) == (2.5, 0.5, 0.9)
    assert row["split_ms"] == pytest.approx([70, 5, 75])
    assert summarise(results, "a", 4) is None


def test_runs_alike_are_summarised_together(tmp_path: Path) -> None:
    for changes in ({}, {}, {"temperature": 0.7}, {"turn_steps": 4}):
        results = results_of(tmp_path, a_turn(BASE, 0, 20, 1.0), **changes)
        results.finish()
    assert [row["turns"] for row in rows_of(results)] == [1]
    results = results_of(tmp_path, a_turn(BASE, 0, 20, 1.0))
    results.run["predicted"] = {BASE: {"2": 1.25}}
    assert [row["turns"] for row in rows_of(results)] == [3]
    assert table(results).splitlines()[0].endswith("with 2 earlier runs")
    assert cells_of(table(results))[1] == [
        "2", "vLLM", "20.0 (20.0-20.0)", "1.000 (1.000-1.000)", "1.250", "100.00", "90.00%", "0.000",
        "50.00 + 0.00 + 50.00", "0",
    ]  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_theorem_is_the_papers(p: float, k: int) -> None:
    """PPD, equations 3 and 5: at d_bar = d/2 a token takes d (1 - p/2), and computes ((k + 1) d + d (1 - p)) / 2."""
    predicted = group.theorem(40, 20, k, p)
    assert predicted == pytest.approx((40 * (1 - p / 2), ((k + 1) * 40 + 40 * (1 - p)) / 2))
    for tokens in (1, 5, 128):  # d l - (d - d_bar) (l - 1) p layers for l tokens, and k (d - d_bar) l more in all
        short = group.theorem(40, 30, k, p, tokens)
        latency = 40 * tokens - 10 * (tokens - 1) * p
        assert [units * tokens for units in short] == pytest.approx([latency, latency + k * 10 * tokens])


def test_group_compares_pipelines(heads_folder: Factory) -> None:
    heads = str(heads_folder(exit_layers=(4,)))
    everyone = {c.name: c for c in group.contenders(options(heads=(heads,), group="1,5", drafts=5, batch_sizes="1,2"))}
    assert list(everyone) == [BASE, CONTROL, "group, k = 1", "group, k = 5", "TP 2"]
    config = everyone["group, k = 5"].speculative_config
    assert config == {
        "method": "ppd", "model": heads, "num_speculative_tokens": 5, "candidates": 5, "disable_by_batch_size": 2,
    }  # fmt: skip
    assert group.split_of(config, 6) == 4
    assert [c.engine for c in everyone.values()] == [{"pipeline_parallel_size": 2}] * 4 + [{"tensor_parallel_size": 2}]
    with pytest.raises(BenchError, match="a single folder of early heads"):
        group.contenders(options(heads=(heads, heads), group="1"))
    with pytest.raises(HeadsError, match="kind 'cp'"):
        group.contenders(options(heads=(str(DEMO.parent / "heads" / "cp"),), group="1"))


def test_groups_are_predicted_by_their_match_rate(tmp_path: Path) -> None:
    """Half the candidates' tokens were right: 6 layers less 3 p (l - 1) / l of the l = 20 tokens after the first."""
    ours = {
        "group_hits": 10.0, "group_misses": 10.0, "group_tokens": 20.0, "group_first_stage_layers": 165.0,
        "group_last_stage_layers": 60.0,
    }  # fmt: skip
    turns = a_turn(BASE, 0, 20, 1.0, ours={}), a_turn("group, k = 2", 0, 20, 0.8, ours=ours), a_turn("TP 2", 0, 20, 1.0)
    results = results_of(tmp_path, *turns, group="2", new_tokens=21)
    configs = {name: identity["speculative_config"] for name, identity in results.contenders.items()}
    expected = {"group, k = 2": {"2": round(6 / (6 - 3 * 0.5 * 19 / 20), 3)}}
    assert group.predictions(rows_of(results), configs, 6, 21) == expected
    row = next(row for row in rows_of(results) if row["contender"] == "group, k = 2")
    assert (match := group.matched(row, 6, 3, 2, 21)) is not None and match.layers == 225 / 20
