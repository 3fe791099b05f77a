# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end `ppd train` with the same words in every phase, and what continues says where."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Factory

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
def words(command: Callable[..., list[str]]) -> list[str]:
    return command("--steps", "12", "--rank", "2", "--positions", "3", "--num-speculative-tokens", "2", kind="cp")


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
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, signals: None, phase: str, number: int
) -> None:
    stopped_in(monkeypatch, phase, number)
    assert main(words) == 130
    told = "ppd: stopped at step 0 of 12; the same command continues it"
    assert capsys.readouterr().err.strip().splitlines()[-1] == told


def test_a_run_that_continues_says_where(words: list[str], stop_at: Factory, capsys: Any) -> None:
    stop_at(6)
    assert main(words) == 130
    text = capsys.readouterr().err
    assert "stopped at step 5 of 12" in text and "continues at" not in text
    assert main(words) == 0
    assert "heads continues at step 5 of 12, after 1,280 tokens\n" in capsys.readouterr().err
