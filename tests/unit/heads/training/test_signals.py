# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end `ppd train` with the same words in every phase, and what
continues says where.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Factory

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.training import loop
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.fixture
def signals() -> Iterator[None]:
    """As in a terminal, also where the tests run in the background, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("owner", "name"), [(Documents, "tokens"), (loop.Run, "evaluate")]
)
def test_a_run_that_has_not_begun_ends_with_the_words_of_the_loop(
    command: Factory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    signals: None,
    owner: Any,
    name: str,
    number: int,
) -> None:
    real = getattr(owner, name)

    def signaled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signaled)
    assert main(command()) == 130
    told = "ppd: stopped at step 0 of 12; the same command continues it"
    assert capsys.readouterr().err.strip().splitlines()[-1] == told
