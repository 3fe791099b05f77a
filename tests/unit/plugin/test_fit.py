# SPDX-License-Identifier: Apache-2.0
"""`ppd fit`: killed at any step it resumes, and ends with heads that load."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory
from forkserver import Forkserver, write_output_to
from records import TEMPLATE, read, templated
from unit.heads.test_generation import FakeEngine

from vllm_ppd.heads.folder import check_folder, load_calibration
from vllm_ppd.heads.options import FitOptions
from vllm_ppd.heads.training.loop import Speed
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.cli import fit
from vllm_ppd.vllm_plugins.cli.main import main

Condition = Callable[[Path], bool]
KILLS: tuple[Condition, ...] = (
    lambda out: (Path(f"{out}.fit") / "others.jsonl").exists(),
    lambda out: (out / ".training" / "checkpoints").exists(),
    lambda out: (out / "provenance.json").exists(),
)


def run_fit(words: list[str], fake: bool, log: Path) -> None:
    """`ppd fit` in a process of its own."""
    write_output_to(log)
    if fake:
        fit.vllm_engine = lambda options: FakeEngine()
    raise SystemExit(main(words))


@pytest.mark.parametrize(
    ("fake", "kills"),
    [
        (True, KILLS[1:2]),
        pytest.param(True, KILLS, marks=pytest.mark.full),
        pytest.param(False, KILLS, marks=[pytest.mark.engine, pytest.mark.full]),
    ],
)
def test_a_fit_that_is_killed_at_every_step_ends_with_heads(
    tmp_path: Path,
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
    fake: bool,
    kills: tuple[Condition, ...],
) -> None:
    out = tmp_path / "heads"
    log = tmp_path / "log"
    model = tiny_model() if fake else DEMO
    words = f"fit {model} --out {out} --minutes 0.01".split()
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "caches"))
    for condition in (*kills, lambda _: False):
        process = Forkserver().Process(target=run_fit, args=(words, fake, log))
        process.start()
        while process.is_alive() and not condition(out):
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
    assert process.exitcode == 0
    assert check_folder(out).kind == "cp" and not (out / ".training").exists()
    assert load_calibration(out)
    (link,) = (tmp_path / "caches" / "vllm_ppd_heads").glob("*/*")
    assert link.resolve() == out
    text = log.read_text()
    assert "step 3 of 3: calibration" in text and "predicted" in text.lower()
    assert text.count("training on ") == 1
    training, held_out = (
        {
            tuple(record["prompt_token_ids"])
            for record in read(Path(f"{out}.fit") / name)
        }
        for name in ("training.jsonl", "held-out.jsonl")
    )
    assert training and held_out and not training & held_out


def test_training_is_sized_by_tokens() -> None:
    """Steps of a GPU hold up to 32K tokens, and many data need less than a pass."""
    for tokens, length in ((10**7, 2048), (10**6, 512), (3000, 64)):
        windows = fit.windows_a_step(tokens, length)
        assert windows % fit.PARTS == 0 and windows * length <= 32_768
        assert windows == fit.PARTS or windows * length * 63 <= tokens
    assert fit.windows_a_step(10**7, 2048) == 16
    for seconds, steps in (
        (-1.0, 1),
        (60.0, 30),  # of the first pass of 100, at two seconds
        (200.0, 100),
        (250.0, 150),
        (1e6, 1600),
    ):
        assert fit.steps_in(seconds, Speed(2.0, 1.0, 100)) == steps


@pytest.mark.parametrize("reasons", [False, True])
def test_answers_are_greedy_and_sampled_and_whole_where_the_model_reasons(
    tmp_path: Path,
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
    reasons: bool,
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    thoughts = "{# <think> #}" if reasons else ""
    templated(TEMPLATE + thoughts).save_pretrained(model)
    engine = FakeEngine()
    monkeypatch.setattr(fit, "vllm_engine", lambda _: engine)
    options = FitOptions(model=str(model), out=str(tmp_path / "h"), minutes=0.01)
    fit.Fit(options, tmp_path).data()
    answers = [sampling for *_, sampling in engine.batches if not sampling.stop]
    assert {sampling.temperature for sampling in answers} >= {0.0, 0.8}
    longest = 512 if reasons else 256  # of a model with 512 positions
    assert all(sampling.max_tokens == longest for sampling in answers[:2])


def test_other_options_and_heads_are_not_mixed(
    tmp_path: Path, tiny_model: Factory, capsys: Any
) -> None:
    model = str(tiny_model())
    out = tmp_path / "heads"
    folder = Path(f"{out}.fit")
    folder.mkdir()
    theirs = {"model": model, "minutes": 5.0, "prompts": [], "seed": 0}
    (folder / "options.json").write_text(json.dumps(theirs))
    heads = DEMO.parent / "heads" / "cp"
    for folder, message in (
        (out, "is of a fit with minutes=5.0, but this run has 60.0"),
        (heads, "already holds heads; delete it or use another folder"),
    ):
        assert main(["fit", model, "--out", str(folder)]) == 2
        assert message in capsys.readouterr().err


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
