# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve`: what is asked for, the arithmetic of its table, and real servers, stopped and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Factory, cells_of, patterned_texts, write_texts
from transformers import AutoTokenizer

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.results import Results, stored
from vllm_ppd.benchmarks.serve import server
from vllm_ppd.benchmarks.serve.options import Load, ServeOptions
from vllm_ppd.benchmarks.serve.run import Workload, send
from vllm_ppd.benchmarks.serve.server import Server, flags
from vllm_ppd.benchmarks.serve.table import COUNTERS, TIMES, rows_of, table

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"model": "model", "data": ("texts.jsonl",), "plain": "none", **changes})


def a_turn(contender: str, number: int, slower: float, **changes: Any) -> dict[str, Any]:
    times = {f"{name}_ms": {"mean": 10 * slower, "p50": 9 * slower, "p95": 20 * slower, "p99": 30.0} for name in TIMES}
    return {
        "contender": contender, "group": 0, "round": number, "rate": 2.0, "concurrency": None, "completed": 8,
        "failed": 0, "requests_per_second": 2.0, "tokens_per_second": 100 / slower, **times,
        **dict.fromkeys(COUNTERS), "prefix_queries": 100, "prefix_hits": 25, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", patterned_texts(40, 6))


def test_loads() -> None:
    loads = options(rates="2,0.5,inf", concurrencies="3").loads
    assert loads == [Load(2.0, None), Load(0.5, None), Load(None, None), Load(None, 3)]
    assert [str(load) for load in loads] == ["2 per second", "0.5 per second", "all at once", "3 at once"]
    assert options(rates="none").loads == [Load(None, 1), Load(None, 4), Load(None, 16)]
    assert options().essence() == options(rates="9", concurrencies="none", rounds=2, out="x.json").essence()


def test_flags_of_a_server() -> None:
    made = options(eager=True, engine='{"enable_prefix_caching": false, "block_size": 32}').engine_arguments
    words = flags(made | {"speculative_config": {"method": "ppd"}})
    assert words[-6:] == [
        "--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32", "--speculative-config",
        '{"method": "ppd"}',
    ]  # fmt: skip
    assert words[words.index("--max-model-len") + 1] == "1024"


def requests_of(workload: Workload, folder: Path, *seed: int) -> list[dict[str, Any]]:
    words = workload.write(folder, *seed)
    assert words[:3] == ["--dataset-name", "custom", "--dataset-path"]
    return [json.loads(line) for line in Path(words[3]).read_text().splitlines()]


def test_requests_are_the_datas_prompts_in_a_drawn_order(
    tiny_model: Factory, texts_file: Path, tmp_path: Path
) -> None:  # fmt: skip
    """No prompt comes twice before all have come; lengths of answers are log-normal and fit."""
    model = str(tiny_model())
    workload = Workload(options(model=model, data=(str(texts_file),), context=128, requests=4000))
    first, other = requests_of(workload, tmp_path, 1), requests_of(workload, tmp_path, 2)
    assert first == requests_of(workload, tmp_path, 1) != other
    prompts = [request["prompt"] for request in first]
    assert {*prompts[: len(workload.prompts)]} == {*workload.prompts} == {*prompts}
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert all(0 < len(tokenizer(prompt)["input_ids"]) <= 64 for prompt in workload.prompts)
    assert all(8 <= request["output_tokens"] <= 64 for request in first)
    options_of_long = options(model=model, data=(str(texts_file),), context=2048, requests=4000)
    lengths = [request["output_tokens"] for request in requests_of(Workload(options_of_long), tmp_path, 1)]
    assert np.median(lengths) == pytest.approx(128, rel=0.08)
    inside = [length for length in lengths if 8 < length < 1024]
    assert np.std(np.log(inside)) == pytest.approx(0.8, rel=0.1)


def test_table_and_what_is_stored(tmp_path: Path) -> None:
    """The machine is twice as slow in round 1; the ratios do not care. A server without speculation has no counters."""
    out = tmp_path / "serve.json"
    drafted = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}
    for changes in ({}, {"also": ('a={"method": "ppd"}',)}):
        made = options(out=str(out), **changes)
        results = Results(made, contenders(made))
        results.add(a_turn(BASE, 0, 1.0))
        results.add(a_turn(BASE, 1, 2.0))
        if changes:
            results.add(a_turn("a", 0, 0.5, **drafted))
            results.add(a_turn("a", 1, 1.0, **drafted, failed=1))
    base, ours = rows_of(results)
    assert base["length"] is base["rate"] is None
    assert (base["ttft"], base["prefix_hits"]) == ((13.5, 30.0), 0.25)
    assert ours["faster_tpot"] == ours["faster_tokens"] == pytest.approx((2.0, 2.0, 2.0))
    assert (ours["length"], ours["rate"]) == (2.5, 0.5)
    (again,) = stored(out)
    assert rows_of(again) == [base, ours]
    shown = table(again)
    assert shown.splitlines()[0].endswith("with 1 earlier runs")
    _, plain, drafting = cells_of(shown)
    assert plain[:7] == ["2 per second", "vLLM", *["13.5 / 30.0"] * 4, "2.00"] and plain[-3:] == ["-", "-", "25.0%"]
    assert drafting[-4:] == ["2.000 (2.000-2.000)", "2.50", "0.500", "25.0%"]
    assert "failed: 1 requests of a, 2 per second" in shown.splitlines()


def marked(mark: str) -> Iterator[bytes]:
    """Command lines of the processes that have a word in their environment, which children inherit."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                yield (folder / "cmdline").read_bytes()
        except OSError:
            continue


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.engine
def test_turns_of_servers_that_are_stopped(tiny_model: Factory, texts_file: Path, tmp_path: Path) -> None:
    """Turns in order, counters that add up, every token that was asked for; after Ctrl-C no process is left."""
    out = tmp_path / "serve.json"
    settings = {
        "model": tiny_model(), "data": texts_file, "plain": "none", "rates": "8", "concurrencies": "none",
        "requests": 6, "new-tokens": 16, "context": 192, "dtype": "float32",
        "kv-cache-gib": 0.05, "rounds": 50, "engine": '{"block_size": 32}', "out": out,
        "also": 'ppd={"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 2, "adaptive": false}',
    }  # fmt: skip
    words = ["bench", "serve", "--eager", *(str(word) for k, v in settings.items() for word in (f"--{k}", v))]
    environment = {**os.environ, "PPD_TEST": str(tmp_path)}
    process = subprocess.Popen([*PPD, *words], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while len(turns_of(out)) < 4:  # a turn of the second round
            assert process.poll() is None
            time.sleep(0.1)
        mark = f"PPD_TEST={tmp_path}"
        assert sum(b"cli.main\x00serve" in line for line in marked(mark)) == 3
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    turns = turns_of(out)
    assert process.returncode == 130, errors
    assert f"ppd: stopped; {len(turns)} turns are kept in {out}" in errors
    assert not json.loads(out.read_text())["runs"][0]["finished"]
    assert not list(marked(mark))
    names = (BASE, CONTROL, "ppd")
    assert [turn["contender"] for turn in turns] == [names[i % 3] for i in range(len(turns))]
    assert {(turn["rate"], turn["concurrency"]) for turn in turns} == {(8.0, None)}
    for turn in turns:
        assert (turn["completed"], turn["failed"]) == (6, 0)
        assert turn["prefix_queries"] == sum(turn["prompt_tokens"])  # every prompt's tokens are looked up once
        assert (turn["drafts"] is not None) == (turn["contender"] == "ppd")
        if turn["contender"] == "ppd":
            assert 0 <= turn["accepted_tokens"] <= turn["draft_tokens"] <= 2 * turn["drafts"]
            # A step makes a token and its accepted drafts; a prefill makes the first one, and at the end some are cut.
            made = 6 + turn["drafts"] + turn["accepted_tokens"]
            assert abs(made - sum(turn["output_tokens"])) <= 6 * 2
    asked = [turn["output_tokens"] for turn in turns]
    assert asked[0] == asked[1] == asked[2] != asked[3]


def turns_of(out: Path) -> list[dict[str, Any]]:
    """What a run has written so far."""
    turns: list[dict[str, Any]] = json.loads(out.read_text())["runs"][0]["turns"] if out.exists() else []
    return turns


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.engine
def test_a_server_that_ends_under_load(
    tiny_model: Factory, texts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPD_TEST", str(tmp_path))
    made = options(
        model=str(tiny_model()), data=(str(texts_file),), context=192, requests=4, new_tokens=96, eager=True,
        dtype="float32", kv_cache_gib=0.05,
    )  # fmt: skip
    running = Server(Contender("tiny"), made.model, made.engine_arguments, tmp_path / "log")
    try:
        dataset = Workload(made).write(tmp_path, 0)
        assert send(running, dataset, Load(None, None), made, 0, tmp_path)["completed"] == 4
        os.killpg(running.process.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="tiny: the server ended with code -9"):
            send(running, dataset, Load(None, None), made, 0, tmp_path)
    finally:
        running.close()
    # This process has the mark since it set it, but not in the environment that it was started with.
    assert not list(marked(f"PPD_TEST={tmp_path}"))


def test_a_contender_has_an_environment_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; sys.exit('LEVEL is ' + os.environ.get('LEVEL', 'unknown'))"
    monkeypatch.setattr(server, "VLLM", [sys.executable, "-c", script])
    with pytest.raises(BenchError, match="its last line: LEVEL is 3"):
        Server(Contender("ours", environment={"LEVEL": "3"}), "model", {}, tmp_path / "log")


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from vllm_ppd.benchmarks.serve import server; "
    code += "server.VLLM = ['/bin/sleep']; print(server.start(['600'], Path(sys.argv[1])).pid, flush=True); "
    command = [sys.executable, "-c", f"{code}sys.stdin.read()", str(tmp_path / "log")]
    environment = {**os.environ, "PPD_TEST": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert b"/bin/sleep\x00600\x00" in marked(f"PPD_TEST={tmp_path}")
        parent.kill()
    deadline = time.monotonic() + 30
    while list(marked(f"PPD_TEST={tmp_path}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(marked(f"PPD_TEST={tmp_path}"))
