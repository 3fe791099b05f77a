# SPDX-License-Identifier: Apache-2.0
"""One writer a folder: who comes second is told in one line who writes it, and harms nobody."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Factory, patterned_texts, write_texts

from vllm_ppd.heads.io import check_folder
from vllm_ppd.heads.locking import InUse, writing_file, writing_folder
from vllm_ppd.heads.training.checkpoint import STATE, WORK
from vllm_ppd.vllm_plugins.cli.main import main

PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]
HOLDS = """
import sys, time
from vllm_ppd.heads.locking import writing_folder
with writing_folder(sys.argv[1]):
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "data.jsonl", patterned_texts(120, 6))


def train(model: Path, data: Path, out: Path, steps: int) -> list[str]:
    return [
        "train", "early", "--model", str(model), "--data", str(data), "--out", str(out), "--steps", str(steps),
        "--device", "cpu", "--sequence-length", "64", "--batch-size", "4", "--precision", "float32",
        "--evaluation-tokens", "512", "--held-out", "0.1", "--save-every", "1",
    ]  # fmt: skip


def test_the_second_of_two_trainings_ends_with_one_line_and_the_first_is_whole(
    tiny_model: Factory, data: Path, tmp_path: Path
) -> None:
    out, steps = tmp_path / "heads", 60
    argv = [*PPD, *train(tiny_model(), data, out, steps)]
    first = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (out / WORK / STATE).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)  # so that it is there when the second comes
    try:
        second = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(120) == 0
    assert second.returncode == 2, second.stderr
    last = second.stderr.strip().splitlines()[-1]
    assert re.search(
        rf"^ppd: error: --out \S+heads is being written by process {first.pid} "
        r"\(python\S* -m vllm_ppd\S+ train .*, since \d+-\d\d-\d\d \d\d:\d\d\); wait for it, or give another folder$",
        last,
    ), last
    assert len(last) <= 300
    check_folder(out)
    points = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points if "loss" in point] == list(range(1, steps + 1))
    assert not (out / ".lock").exists()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(out)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    with pytest.raises(InUse, match=f"process {holder.pid} "), writing_folder(out):
        pass
    holder.kill()
    holder.wait()
    assert (out / ".lock").exists()
    with writing_folder(out):
        pass
    assert not (out / ".lock").exists()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    """An engine may outlive the process that started it."""
    ours, theirs = os.pipe()
    with writing_file(tmp_path / "a.jsonl"):
        if not (child := os.fork()):
            os.read(ours, 1)
            os._exit(0)
        with pytest.raises(InUse), writing_file(tmp_path / "a.jsonl"):
            pass
    try:
        with writing_file(tmp_path / "a.jsonl"):
            pass
    finally:
        os.write(theirs, b".")
        os.waitpid(child, 0)


def test_a_file_is_one_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    again = pytest.raises(InUse, match="or give another file")
    with writing_file(tmp_path / "a"), again, writing_file(tmp_path / "link" / "a"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"link"}


def test_commands_that_continue_say_who_writes(tiny_model: Factory, data: Path, tmp_path: Path, capsys: Any) -> None:
    """Before a model is loaded."""
    heads, results = tmp_path / "heads", tmp_path / "results.json"
    assert main(train(tiny_model(), data, heads, 1)) == 0
    with writing_folder(heads), writing_file(results):
        for command, name in (
            (["calibrate", str(heads), "--data", str(data)], "heads folder "),
            (["data", "--model", str(tiny_model()), "--prompts", str(data), "--out", str(results)], "--out "),
        ):
            capsys.readouterr()
            assert main(command) == 2
            last = capsys.readouterr().err.strip().splitlines()[-1]
            assert last.startswith(f"ppd: error: {name}") and f"is being written by process {os.getpid()} (" in last
    assert not results.exists()
