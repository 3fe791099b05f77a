# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: two contenders on a tiny model, stopped and started again; and the arithmetic of its tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import DEMO, cells_of

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.table import overview, rows_of, summarise, table
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.prompts import read_prompts
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.benchmarks.harness.session import OneByOne
from vllm_ppd.vllm_plugins.cli.main import main

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]


def options(**changes: Any) -> DecodeOptions:
    return DecodeOptions(**{"model": "model", "data": ("prompts.jsonl",), "plain": "none", **changes})


def test_engines_start_beside_others_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check at the start, on a GPU that another engine has half of; the KV cache has its own size."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    names = ("gpu_memory_utilization", "kv_cache_memory_bytes")
    assert names[0] not in options().engine_arguments
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = options(kv_cache_gib=3).engine_arguments
    assert found["kv_cache_memory_bytes"] == 3 << 30
    half: Any = SimpleNamespace(total_memory=80 << 30, free_memory=40 << 30, device_="cuda:0")
    request_memory(half, CacheConfig(**{name: found[name] for name in names}))
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(half, CacheConfig(kv_cache_memory_bytes=3 << 30))
    assert options(engine='{"gpu_memory_utilization": 0.5}').engine_arguments["gpu_memory_utilization"] == 0.5


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": [(7 * i + j * j) % 250 + 2 for j in range(20 + i)]} for i in range(16)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def command(tiny_model: Callable[..., Path], ids_file: Path, tmp_path: Path) -> list[str]:
    settings = {
        "model": tiny_model(), "data": ids_file, "plain": "none", "batch-sizes": "1,3", "prompt-tokens": 24,
        "new-tokens": 24, "dtype": "float32", "kv-cache-gib": 0.05, "out": tmp_path / "bench.json",
    }  # fmt: skip
    flags = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    return ["bench", "decode", "--eager", *flags]


@pytest.mark.engine
def test_turns_of_a_run_that_is_stopped(command: list[str], tmp_path: Path) -> None:
    """Every turn is kept, in order; the method says what the base says."""
    command += ["--rounds", "300", "--batch-sizes", "3,1", "--also"]
    command += ['ppd={"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 2, "adaptive": false}']
    process = subprocess.Popen([*PPD, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(_runs(tmp_path)["turns"]) < 6 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    run = _runs(tmp_path)
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


class Sham:
    """A contender without an engine."""

    facts: ClassVar[dict[str, Any]] = {"free_bytes": 10, "peak_bytes": 1}

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def close(self) -> None:
        self.closed = True


class Shams(OneByOne[Sham, int]):
    """Contenders that fail at the start, in a turn, or never."""

    def start(self, contender: Contender, log: Path) -> Sham:
        if contender.name == "broken":
            raise BenchError("broken: no such layer")
        return Sham(contender.name)

    def warm_up(self, one: Sham, load: int) -> None:
        pass

    def turn(self, one: Sham, load: int, number: int) -> dict[str, Any]:
        if one.name == "fragile" and number == 1:
            raise BenchError("fragile: out of memory")
        return {"batch": load}


def test_what_fails_is_left_out(tmp_path: Path) -> None:
    """A contender that does not start, and one that fails in its second turn; the others go on."""
    made, everyone = options(out=str(tmp_path / "bench.json"), rounds=3), [
        Contender(name) for name in (BASE, "broken", "fragile", "sound")
    ]  # fmt: skip
    results = Results(made, everyone)
    Shams(made, {1: results}).measure(everyone)
    assert results.run["failures"] == {"broken": "broken: no such layer", "fragile": "fragile: out of memory"}
    order = [(turn["round"], turn["contender"]) for turn in results.run["turns"]]
    assert order == [(0, BASE), (0, "fragile"), (0, "sound"), (1, BASE), (1, "sound"), (2, BASE), (2, "sound")]
    assert results.run["finished"]


class Together(Shams):
    """Contenders of which it is told when they start, and when they are waited for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: list[str] = []

    def start(self, contender: Contender, log: Path) -> Sham:
        self.events.append(f"start {contender.name}")
        return super().start(contender, log)

    def ready(self, one: Sham) -> None:
        self.events.append(f"ready {one.name}")
        if one.name == "slow":
            raise BenchError("slow: out of memory")


def test_engines_that_start_together(tmp_path: Path) -> None:
    """All of a group start before one is waited for; which fails is left out, and closed."""
    everyone = [Contender(name) for name in (BASE, "a", "slow", "broken", "b")]
    made = options(out=str(tmp_path / "bench.json"), rounds=1, alive=4, together=True)
    shams = Together(made, {1: (results := Results(made, everyone))})
    shams.measure(everyone)
    first = [f"start {name}" for name in (BASE, "a", "slow", "broken")]
    assert shams.events == [*first, *(f"ready {name}" for name in (BASE, "a", "slow")), "start b", "ready b"]
    assert results.run["failures"] == {"broken": "broken: no such layer", "slow": "slow: out of memory"}
    assert [turn["contender"] for turn in results.run["turns"]] == [BASE, "a", BASE, "b"]
    with pytest.raises(ValueError, match="--together needs --alive"):
        options(together=True)


def _runs(folder: Path) -> dict[str, Any]:
    path = folder / "bench.json"
    return json.loads(path.read_text())["runs"][0] if path.exists() else {"turns": []}


@pytest.mark.full
@pytest.mark.engine
def test_samples_of_vllms_own_methods_are_mended(command: list[str], tmp_path: Path) -> None:
    """Temperature 0.01 is as good as greedy; with sampling parameters dropped, one draft in a hundred is accepted."""
    command += ["--rounds", "1", "--batch-sizes", "3", "--new-tokens", "160", "--prompt-tokens", "24", "--temperature"]
    assert main([*command, "0.01", "--plain", "ngram"]) == 0
    run = _runs(tmp_path)
    (turn,) = (turn for turn in run["turns"] if turn["contender"] == "ngram")
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


def turn(contender: str, number: int, tokens: int, seconds: float, **changes: Any) -> dict[str, Any]:
    zero = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "repeated_4_grams", "all_4_grams"), 0)
    return {
        "contender": contender, "batch": 2, "group": 0, "round": number, "window_tokens": tokens, "steps": 10,
        "window_seconds": seconds, "step_seconds": seconds / 10, "worker_seconds": seconds / 2, "draft_seconds": 0.0,
        "same_tokens": 9, "compared_tokens": 10, "peak_bytes": 5, **zero, **changes,
    }  # fmt: skip


def test_overview_has_a_column_a_batch_size(tmp_path: Path) -> None:
    given = options(out=str(tmp_path / "bench.json"), also=('a={"method": "ppd"}',))
    results = Results(given, contenders(given))
    drafted = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 5}
    results.add(turn(BASE, 0, 20, 1.0))
    results.add(turn("a", 0, 30, 1.0, **drafted))
    results.add(turn(BASE, 0, 40, 1.0, batch=16))
    assert cells_of(overview(results)) == [
        ["contender", "batch 2", "batch 16", "length, batch 2"],
        ["vLLM", "1.00 (1.00-1.00)", "1.00 (1.00-1.00)", "-"],
        ["a", "1.50 (1.50-1.50)", "-", "1.50"],
    ]


def test_ratios_are_paired_by_round() -> None:
    """The machine is twice as slow in round 1; the ratio does not care, the median of tokens a second does."""
    drafted = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15, "draft_seconds": 0.1}
    turns = [turn(BASE, 0, 20, 1.0), turn("a", 0, 30, 1.0, **drafted), turn(BASE, 1, 20, 2.0), turn("a", 1, 30, 2.0)]
    row = summarise([{"turns": turns}], "a", 2)
    assert row is not None
    assert row["speed_up"] == pytest.approx((1.5, 1.5, 1.5))
    assert row["tokens_per_second"] == pytest.approx((22.5, 18.75, 26.25))
    assert (row["length"], row["rate"], row["consistency"]) == (2.5, 0.5, 0.9)
    assert (row["verify_ms"], row["draft_ms"], row["host_ms"]) == pytest.approx((70, 5, 75))
    assert summarise([{"turns": turns}], "a", 4) is None


def test_runs_alike_are_summarised_together(tmp_path: Path) -> None:
    out = str(tmp_path / "bench.json")
    for changes in ({}, {}, {"temperature": 0.7}):
        opts = options(out=out, **changes)
        results = Results(opts, contenders(opts))
        results.add(turn(BASE, 0, 20, 1.0))
        results.finish()
    assert [row["turns"] for row in rows_of(results)] == [1]
    results = Results(options(out=out), contenders(options()))
    results.add(turn(BASE, 0, 20, 1.0))
    assert [row["turns"] for row in rows_of(results)] == [3]
    assert table(results).splitlines()[0].endswith("with 2 earlier runs")
    assert cells_of(table(results))[1] == [
        "2", "vLLM", "20.0 (20.0-20.0)", "1.000 (1.000-1.000)", "100.00", "-", "-", "90.00%", "0.000",
        "50.00 + 0.00 + 50.00", "0",
    ]  # fmt: skip
    assert [run["finished"] for run in json.loads(Path(out).read_text())["runs"]] == [True, True, True, False]
    Path(out).write_text("[]")
    with pytest.raises(BenchError, match="is no file of results"):
        Results(options(out=out), [])


def test_a_run_each_temperature(tmp_path: Path) -> None:
    """All in one file, each with turns that were before."""
    given = options(out=str(tmp_path / "bench.json"), temperatures="0,0.7")
    for times in (1, 2):
        first = Results(given.runs[0], contenders(given))
        second = Results(given.runs[1], contenders(given), first)
        second.add(turn(BASE, 0, 20, 1.0))
        first.add(turn(BASE, 0, 40, 1.0))
        assert [row["turns"] for row in rows_of(first) + rows_of(second)] == [times, times]
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    found = [(run["options"]["temperature"], run["turns"][0]["window_tokens"]) for run in runs]
    assert found == [(0.0, 40), (0.7, 20)] * 2
    assert [run.temperature for run in options(temperature=0.3).runs] == [0.3]
    with pytest.raises(ValueError, match="each given once"):
        options(temperatures="1,1")


def test_contenders(tmp_path: Path) -> None:
    cp = str(DEMO.parent / "heads" / "cp")
    found = {c.name: c for c in contenders(options(heads=(cp,), plain="ppd,ngram", drafts=16))}
    assert list(found) == [BASE, CONTROL, "cp", "ppd, no heads", "ngram"]
    assert found["cp"].speculative_config == {"model": cp, "num_speculative_tokens": 3}
    assert found["ngram"].speculative_config["num_speculative_tokens"] == 16  # type: ignore[index]
    (further,) = contenders(options(also=('two={"method": "ppd", "engine": {"tensor_parallel_size": 2}}',)))[2:]
    (alone,) = contenders(options(also=('V1={"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}',)))[2:]
    assert (alone.speculative_config, alone.environment) == (None, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert (further.speculative_config, further.engine) == ({"method": "ppd"}, {"tensor_parallel_size": 2})
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3LlamaForCausalLM"]}')
    (eagle,) = contenders(options(eagle=str(tmp_path)))[2:]
    assert eagle.speculative_config["method"] == "eagle3"  # type: ignore[index]
    with pytest.raises(BenchError, match="--medusa nowhere: no config"):
        contenders(options(medusa="nowhere"))
    with pytest.raises(BenchError, match="not NAME="):
        contenders(options(also=('{"method": "ppd"}',)))
    with pytest.raises(BenchError, match="two contenders are called 'ppd, no heads'"):
        contenders(options(plain="ppd", also=("ppd, no heads={}",)))


def test_prompts(tiny_model: Callable[..., Path], ids_file: Path, tmp_path: Path) -> None:
    found = read_prompts((str(ids_file),), "no model needed", 24, 100, False)
    assert [len(ids) for ids in found] == [20, 21, 22, 23] + [24] * 12
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text in ("a" * 100, "short one", "b" * 40)))
    found = read_prompts((str(texts),), str(tiny_model()), 8, 100, False)
    # One of each document first, from its middle; strides of 32 tokens leave three places of 100, two of 40.
    assert [len(ids) for ids in found] == [8, 8, 8, 8, 8, 8]
    assert found[0] == found[3] == found[5] != found[1]
    assert read_prompts((str(texts),), str(tiny_model()), 8, 2, False) == found[:2]
    texts.write_text(json.dumps({"text": "ab"}))
    with pytest.raises(BenchError, match="no document has 4 tokens"):
        read_prompts((str(texts),), str(tiny_model()), 8, 2, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sizes", "0"], "--batch-sizes 0: a batch holds at least one request"),
        (["--engine", "[1]"], "must be a JSON object"),
        (["--plain", "lookahead"], "--plain"),
    ],
)
def test_bad_flags_end_with_one_line(flags: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", "decode", "--model", "m", "--data", "d", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
