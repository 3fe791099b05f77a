# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve`: what is asked for, the arithmetic of its table, and real servers, stopped and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_turns import serve_options as options
from bench_turns import serve_turn as turn
from conftest import cells_of, patterned_texts, write_texts

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.results import Results, stored
from vllm_ppd.benchmarks.harness.with_parent import command
from vllm_ppd.benchmarks.serve import server
from vllm_ppd.benchmarks.serve.generator import send
from vllm_ppd.benchmarks.serve.options import Load
from vllm_ppd.benchmarks.serve.run import load_rows
from vllm_ppd.benchmarks.serve.server import Server, flags
from vllm_ppd.benchmarks.serve.table import table
from vllm_ppd.benchmarks.serve.workload import Texts, draw_lengths
from vllm_ppd.vllm_plugins.cli.main import main

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", patterned_texts(40, 6))


def test_loads() -> None:
    found = options(rates="2,0.5,inf", concurrencies="3").loads
    assert found == [Load(2.0, None), Load(0.5, None), Load(None, None), Load(None, 3)]
    assert [str(load) for load in found] == ["2 a second", "0.5 a second", "all at once", "3 at once"]
    assert options(rates="none").loads == [Load(None, 1), Load(None, 4), Load(None, 16)]
    assert options().essence() == options(rates="9", concurrencies="none", rounds=2, out="x.json").essence()


def test_flags_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = options(eager=True, engine='{"enable_prefix_caching": false, "block_size": 32}').engine_arguments
    words = flags(made | {"speculative_config": {"method": "ppd"}})
    assert words[-6:] == [
        "--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32", "--speculative-config",
        '{"method": "ppd"}',
    ]  # fmt: skip
    assert words[words.index("--max-model-len") + 1] == "1024"
    assert "--gpu-memory-utilization" not in words
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = flags(options().engine_arguments)
    # On a GPU vLLM wants that share free before it starts: servers stand side by side.
    assert float(words[words.index("--gpu-memory-utilization") + 1]) < 0.05


def test_lengths_are_log_normal_and_fit() -> None:
    made = options(requests=4000, shared=0.25, shared_tokens=100)
    found = draw_lengths(made, np.random.default_rng(0))
    assert (found.shared == 100).sum() == 1000
    alone = found.prompt[found.shared == 0]
    assert np.median(alone) == pytest.approx(96, rel=0.08)
    assert np.median(found.prompt[found.shared > 0]) == pytest.approx(196, rel=0.08)
    inside = found.answer[(found.answer > 8) & (found.answer < 512)]
    assert np.std(np.log(inside)) == pytest.approx(0.8, rel=0.1)
    assert np.median(found.answer) == pytest.approx(128, rel=0.08)
    assert found.prompt.min() >= 8
    assert max(found.prompt.max(), found.answer.max()) == 512


def test_texts_have_the_lengths_drawn(tiny_model: Callable[..., Path], texts_file: Path) -> None:
    """Prompts and answers follow one another in the data, and a half of the prompts begins alike."""
    made = options(
        model=str(tiny_model()), data=(str(texts_file),), context=128, requests=12, prompt_tokens=24, new_tokens=16,
        shared_tokens=32,
    )  # fmt: skip
    texts = Texts(made)
    found = texts.requests(1, 0)
    assert found == texts.requests(1, 0) != texts.requests(1, 1)
    lengths = draw_lengths(made, np.random.default_rng([0, 1, 0]))
    for request, prompt, answer in zip(found, lengths.prompt, lengths.answer, strict=True):
        tokens = [len(texts.tokenizer(text)["input_ids"]) for text in request]
        assert prompt - 2 <= tokens[0] <= prompt
        assert answer - 2 <= tokens[1] <= answer
    whole = texts.tokenizer.decode(texts.stream)
    assert all(request.answer in whole for request in found)
    alike = [request.prompt for request, shared in zip(found, lengths.shared, strict=True) if shared]
    assert len(alike) == 6
    assert len(os.path.commonprefix(alike)) >= len(texts.tokenizer.decode(texts.stream[:24]))
    with pytest.raises(BenchError, match="give more text"):
        Texts(made.model_copy(update={"context": 100_000}))


def test_table_and_what_is_stored(tmp_path: Path) -> None:
    """The machine is twice as slow in round 1; the ratios do not care. A server without speculation has no counters."""
    out = tmp_path / "serve.json"
    drafted = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}
    for changes in ({}, {"also": ('a={"method": "ppd"}',)}):
        made = options(out=str(out), **changes)
        results = Results(made, contenders(made))
        results.add(turn(BASE, 0, 1.0))
        results.add(turn(BASE, 1, 2.0))
        if changes:
            results.add(turn("a", 0, 0.5, **drafted))
            results.add(turn("a", 1, 1.0, **drafted, failed=1))
    base, ours = load_rows(results)
    assert base["length"] is base["rate"] is None
    assert (base["ttft"], base["prefix_hits"]) == ((13.5, 30.0), 0.25)
    assert ours["faster_tpot"] == ours["faster_tokens"] == pytest.approx((2.0, 2.0, 2.0))
    assert (ours["length"], ours["rate"]) == (2.5, 0.5)
    (again,) = stored(out)
    assert load_rows(again) == [base, ours]
    shown = table(again)
    assert shown.splitlines()[0].endswith("with 1 earlier runs")
    _, plain, drafting = cells_of(shown)
    assert plain[:7] == ["2 a second", "vLLM", *["13.5 / 30.0"] * 4, "2.00"] and plain[-3:] == ["-", "-", "25.0%"]
    assert drafting[-4:] == ["2.000 (2.000-2.000)", "2.50", "0.500", "25.0%"]
    assert shown.splitlines()[-1] == "failed: 1 requests of a, 2 a second"
    with pytest.raises(BenchError, match="holds results of another benchmark"):
        data = json.loads(out.read_text())
        out.write_text(json.dumps(data | {"benchmark": "decode"}))
        Results(options(out=str(out)), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "0"], "--rates 0: must be above 0"),
        (["--rates", "none", "--concurrencies", "none"], "--concurrencies none: no load is left"),
        (["--shared-tokens", "600"], "--shared-tokens 600: leaves no room for the rest of a prompt"),
        (["--rates", "nan"], "--rates nan: must be above 0"),
    ],
)
def test_bad_flags_end_with_one_line(words: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", "serve", "--model", "m", "--data", "d", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_killed_parent_takes_its_children_along() -> None:
    code = "import subprocess, sys; from vllm_ppd.benchmarks.harness.with_parent import command; "
    code += "print(subprocess.Popen(command(['/bin/sleep', '600'])).pid, flush=True); sys.stdin.read()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 10
    while b"sleep" not in _command_line(child)[:12] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _command_line(child) == b"/bin/sleep\x00600\x00"
    parent.kill()
    parent.wait()
    while _command_line(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _command_line(child)
    refused = subprocess.run([*command([])[:-1], "1", "/bin/true"], capture_output=True, text=True)
    assert refused.stderr.strip() == "the parent has ended"


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _marked(mark: str) -> list[bytes]:
    """Command lines of the processes that have a word in their environment, which children inherit."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.engine
def test_a_server_that_does_not_start(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 26, "dtype": "float32", "enforce_eager": True}
    with pytest.raises(BenchError, match=r"bad: the server ended with code 2; its last line: .*exit_layer=99"):
        Server(Contender("bad", {"method": "ppd", "exit_layer": 99}), str(tiny_model()), arguments, tmp_path / "log")


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.engine
def test_turns_of_servers_that_are_stopped(tiny_model: Callable[..., Path], texts_file: Path, tmp_path: Path) -> None:
    """Turns in order, counters that add up, every token that was asked for; then Ctrl-C, and no process is left."""
    out = tmp_path / "serve.json"
    settings = {
        "model": tiny_model(), "data": texts_file, "plain": "none", "rates": "8", "concurrencies": "2",
        "requests": 6, "prompt-tokens": 24, "new-tokens": 16, "context": 192, "shared-tokens": 64, "dtype": "float32",
        "kv-cache-gib": 0.05, "rounds": 1, "engine": '{"block_size": 32}', "out": out,
        "also": 'ppd={"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 2, "adaptive": false}',
    }  # fmt: skip
    words = ["bench", "serve", "--eager", *(str(part) for k, v in settings.items() for part in (f"--{k}", v))]
    assert main(words) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["finished"]
    turns = run["turns"]
    loads = [(8.0, None), (None, 2)]
    order = [(turn["rate"], turn["concurrency"], turn["contender"]) for turn in turns]
    assert order == [(*load, name) for load in loads for name in (BASE, CONTROL, "ppd")]
    for one in turns:
        assert (one["completed"], one["failed"]) == (6, 0)
        assert len(one["latency"]) == len(one["arrival"]) == 6
        assert all(0 < first <= last for first, last in zip(one["ttft"], one["latency"], strict=True))
        # Every prompt's tokens are looked up once; whole blocks of the common beginning are hits.
        assert one["prefix_queries"] == sum(one["prompt_tokens"])
        assert 0 < one["prefix_hits"] <= 2 * 64
        ours = one["contender"] == "ppd"
        assert (one["drafts"] is not None) == ours
        if ours:
            assert 0 <= one["accepted_tokens"] <= one["draft_tokens"] <= 2 * one["drafts"]
            # A step makes a token and its accepted drafts; a prefill makes the first one, and at the end some are cut.
            made = 6 + one["drafts"] + one["accepted_tokens"]
            assert abs(made - sum(one["output_tokens"])) <= 6 * 2
    asked = [turn["output_tokens"] for turn in turns]
    assert asked[0] == asked[1] == asked[2] != asked[3]
    assert all(hits == turns[0]["prefix_hits"] for hits in [turn["prefix_hits"] for turn in turns[:3]])
    # Further turns, stopped under load.
    mark = f"PPD_TEST={tmp_path}"
    environment = {**os.environ, "PPD_TEST": str(tmp_path)}
    process = subprocess.Popen([*PPD, *words, "--rounds", "50"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while not (runs := json.loads(out.read_text())["runs"])[1:] or not runs[1]["turns"]:
            assert process.poll() is None
            time.sleep(0.1)
        assert sum(b"cli.main\x00serve" in line for line in _marked(mark)) == 3
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    runs = json.loads(out.read_text())["runs"]
    assert process.returncode == 130, errors
    assert len(runs) == 2
    assert runs[0] == run
    assert not runs[1]["finished"]
    assert f"ppd: stopped; {len(runs[1]['turns'])} turns are kept in {out}" in errors
    assert not _marked(mark)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.engine
def test_a_server_that_ends_under_load(
    tiny_model: Callable[..., Path], texts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPD_TEST", str(tmp_path))
    made = options(
        model=str(tiny_model()), data=(str(texts_file),), context=192, requests=4, prompt_tokens=24, new_tokens=96,
        shared=0, eager=True, dtype="float32", kv_cache_gib=0.05,
    )  # fmt: skip
    server = Server(Contender("one"), made.model, made.engine_arguments, tmp_path / "log")
    try:
        requests = Texts(made).requests(0)
        assert send(server, requests, Load(None, None), 0.0, 0)["completed"] == 4
        os.killpg(server.process.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="one: the server ended with code -9"):
            send(server, requests, Load(None, None), 0.0, 0)
    finally:
        server.close()
    # This process has the mark since it set it, but not in the environment that it was started with.
    assert not _marked(f"PPD_TEST={tmp_path}")


def test_a_contender_has_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; sys.exit('LEVEL is ' + os.environ.get('LEVEL', 'unknown'))"
    monkeypatch.setattr(server, "VLLM", [sys.executable, "-c", script])
    with pytest.raises(BenchError, match="its last line: LEVEL is 3"):
        Server(Contender("ours", environment={"LEVEL": "3"}), "model", {}, tmp_path / "log")
