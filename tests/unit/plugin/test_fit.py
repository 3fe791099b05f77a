# SPDX-License-Identifier: Apache-2.0
"""`ppd fit`: killed at any moment it ends the same, it chooses by the time, and its page says what was measured."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import Factory, cells_of
from unit.heads.generation.test_write import FakeEngine

from vllm_ppd.heads.fitting import choices
from vllm_ppd.heads.fitting.data import HELD_OUT
from vllm_ppd.heads.fitting.state import SHARES, State
from vllm_ppd.heads.io import check_folder
from vllm_ppd.heads.training.loop import Speed
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.cli import fit
from vllm_ppd.vllm_plugins.cli.main import main

CHATS = 6 * HELD_OUT
Run = Callable[..., Path]


class ClosedEngine(FakeEngine):
    """vLLM's takes 20 seconds to start; this one writes what its seeds say."""

    def close(self) -> None: ...


def begin(words: list[str], log: Path, fake: bool) -> int:
    """Start a fit; returns the id of its process."""
    if not fake:
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        with log.open("w") as file:
            program = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main", *words]
            return subprocess.Popen(program, stdout=file, stderr=file, env=surroundings).pid
    if not (child := os.fork()):  # a new process would take seconds to import torch
        code = 1
        try:
            with log.open("w") as sys.stdout, log.open("w") as sys.stderr:
                torch.set_num_threads(1)  # a forked process has no other
                fit.vllm_engine = lambda options: ClosedEngine()  # type: ignore[assignment, return-value]
                code = main(words)
        finally:
            os._exit(code)
    return child


@pytest.fixture
def run(tmp_path: Path, tiny_model: Factory) -> Run:
    """run(name, *conditions, chosen=..., fake=...): heads of a fit that is killed as soon as each condition holds."""

    def finished(name: str, *conditions: Callable[[Path], bool], chosen: dict[str, Any], fake: bool) -> Path:
        out, log = tmp_path / name, tmp_path / "log"
        options = {"model": str(tiny_model()), "minutes": 0.5, "prompts": [], "seed": 0}
        folder = Path(f"{out}.fit")
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"options": options, "chosen": chosen}))
        for condition in (*conditions, lambda _: False):
            process = begin(["fit", str(tiny_model()), "--out", str(out), "--minutes", "0.5"], log, fake)
            while not (ended := os.waitpid(process, os.WNOHANG))[0] and not condition(out):
                time.sleep(0.005)
            if not ended[0]:
                os.kill(process, signal.SIGKILL)
                ended = os.waitpid(process, 0)
            assert os.waitstatus_to_exitcode(ended[1]) in (0, -signal.SIGKILL), log.read_text()
        assert not ended[1]
        return out

    return finished


def chats_in(out: Path, name: str) -> int:
    path = Path(f"{out}.fit") / name
    return path.read_bytes().count(b"\n") if path.exists() else 0


KILLS: tuple[Callable[[Path], bool], ...] = (
    lambda out: chats_in(out, "answers.jsonl") > CHATS / 2,
    lambda out: chats_in(out, "others.jsonl") > CHATS / 2,
    lambda out: (out / ".training" / "state").exists(),
    lambda out: (out / "calibration.json").exists(),
)


KNOWN = {name: {"chats": CHATS, "tokens_a_second": 1e5} for name in ("answers", "others")}


def test_a_fit_that_is_killed_again_and_again_ends_as_another_that_chooses_the_same(run: Run) -> None:
    """In the data, the training and the calibration. The heads are the same bit by bit, and so is what is measured."""
    killed = run("killed", *KILLS, chosen=KNOWN, fake=True)
    state = (Path(f"{killed}.fit") / "state.json").read_text()
    chosen = json.loads(state.replace(str(killed), str(killed.with_name("whole"))))["chosen"]
    del chosen["data"]
    whole = run("whole", chosen=chosen, fake=True)
    for name in ("answers.jsonl", "others.jsonl", "training.jsonl", "held-out.jsonl"):
        assert (Path(f"{killed}.fit") / name).read_bytes() == (Path(f"{whole}.fit") / name).read_bytes(), name
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    parts = [json.loads((folder / "calibration.json").read_text())["parts"] for folder in (killed, whole)]
    assert parts[0]["acceptance"] == parts[1]["acceptance"]
    check_finished(killed)


@pytest.mark.engine
@pytest.mark.full
def test_a_fit_with_vllms_engine_goes_on_where_it_was_killed(run: Run) -> None:
    """What it writes is the same up to rounding in other batches, which is not compared."""
    check_finished(run("killed", *KILLS, chosen=KNOWN, fake=False))


def check_finished(out: Path) -> None:
    """All stages are done, the heads are sound, and the page has what was measured."""
    assert json.loads((Path(f"{out}.fit") / "state.json").read_text())["done"] == [*SHARES]
    assert check_folder(out).kind == "cp" and not (out / ".training").exists()
    page = (out / "fit.md").read_text()
    measured = re.findall(r"\| prompts.*?\n\n", page, re.DOTALL)
    assert len(measured) == 2, "greedy and sampled"
    for rows in map(cells_of, measured):
        assert [row[0] for row in rows[1:]] == ["all", *dict.fromkeys(categories(out))]
        assert all(float(row[-1]) == pytest.approx(sum(map(float, row[1:-1])), abs=0.002) for row in rows[1:])
    assert re.search(r"^    vllm serve ", page, re.MULTILINE)
    for name in re.findall(r"\((fit-.*?svg)\)", page):
        ElementTree.parse(out / name)


def categories(out: Path) -> list[str]:
    lines = (Path(f"{out}.fit") / "held-out.jsonl").read_text().splitlines()
    return [json.loads(line)["category"] for line in lines]


def test_chats_end_with_the_time_however_fast_the_engine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(choices.time, "monotonic", lambda: clock[0])
    state = State(tmp_path, {"minutes": 1.0})
    stage: Any = SimpleNamespace(seconds=0.0, planned=200.0)
    enough = choices.Enough(state, stage, "answers", 0.5, 50)
    writer: Any = SimpleNamespace(
        engine=SimpleNamespace(generated=0), file=SimpleNamespace(count=0), running=10, open=10, wanted=1e9
    )
    while writer.wanted == 1e9:
        enough(writer)
        clock[0] += 1.0
        stage.seconds = clock[0]
        writer.engine.generated += 50  # five tokens for each of ten chats, so that a chat of fifty takes ten seconds
        writer.file.count = writer.engine.generated // 50
    assert 88 <= clock[0] <= 92
    assert writer.wanted == state.facts.chosen["answers"]["chats"]
    assert State(tmp_path, {"minutes": 1.0}).facts.chosen == state.facts.chosen
    assert main(["fit", "x", "--out", "x", "--minutes", "0"]) == 2


def test_more_time_is_more_passes_and_a_calibration_of_more_prompts() -> None:
    speed = Speed(step=0.5, target=1.5, steps=10.0)
    assert [choices.passes_in(seconds, speed) for seconds in (10, 20, 25, 30, 1e6)] == [0.5, 1.0, 2.0, 3.0, 16.0]
    assert choices.schedule(3.0, speed) == {"steps": 30, "evaluate_every": 3, "patience": 6, "save_every": 30}
    assert [choices.prompts_in(seconds, 768.0, 100) for seconds in (1, 20, 1e6)] == [8, 20, 100]


def test_an_engine_ends_with_the_process_that_asks_for_it() -> None:
    reading, writing = os.pipe()
    if not (starter := os.fork()):
        os.environ[platform.ENDS_WITH] = str(os.getpid())
        if not os.fork():
            platform.end_with_parent()
            os.write(writing, b"started")
        time.sleep(300)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 99) == b"started"
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    assert os.read(reading, 99) == b"", "its child has not closed the pipe"
