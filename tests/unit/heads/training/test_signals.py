# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end `ppd train` with the same words in every phase, and what continues says where."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import patterned_texts, write_texts

from vllm_ppd.heads.cp.recipe import CPRecipe
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.tokens import TokenStore
from vllm_ppd.vllm_plugins.cli.main import main

PHASES: dict[str, tuple[Any, str]] = {
    "tokenising": (Documents, "tokens"),
    "reading states": (CPRecipe, "_regressed"),
    "evaluating": (loop, "evaluate"),
    "counting the vocabulary": (TokenStore, "token_counts"),
}


@pytest.fixture
def command(tiny_model: Callable[..., Path], tmp_path: Path) -> list[str]:
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(120, 6))
    return [
        "train", "cp", "--model", str(tiny_model()), "--data", str(data), "--out", str(tmp_path / "heads"),
        "--steps", "12", "--device", "cpu", "--sequence-length", "64", "--batch-size", "4", "--precision", "float32",
        "--held-out", "0.1", "--evaluation-tokens", "512", "--rank", "2", "--positions", "3",
        "--num-speculative-tokens", "2",
    ]  # fmt: skip


@pytest.fixture
def signals() -> Iterator[None]:
    """As in a terminal, also where the tests run in the background, which ignores SIGINT.

    A command that does not listen to SIGTERM runs to its end, and does not end the tests.
    """
    handlers = {signal.SIGTERM: lambda *_: None, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped_in(monkeypatch: pytest.MonkeyPatch, phase: str, number: int) -> None:
    """Send a signal where a phase begins."""
    owner, name = PHASES[phase]
    real = getattr(owner, name)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_ends_with_the_words_of_the_loop(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, signals: None, phase: str, number: int
) -> None:
    stopped_in(monkeypatch, phase, number)
    assert main(command) == 130
    told = "ppd: stopped at step 0 of 12; the same command continues it"
    assert capsys.readouterr().err.strip().splitlines()[-1] == told


def test_a_run_that_continues_says_where(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    compute = loop._Run._loss_and_gradient

    def signalled(self: Any, *args: Any) -> Any:
        if self.facts.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, *args)

    monkeypatch.setattr(loop._Run, "_loss_and_gradient", signalled)
    assert main(command) == 130
    told = capsys.readouterr().err
    assert "stopped at step 5 of 12" in told and "continues at" not in told
    monkeypatch.undo()
    assert main(command) == 0
    assert "heads continues at step 5 of 12, after 1,280 tokens\n" in capsys.readouterr().err
