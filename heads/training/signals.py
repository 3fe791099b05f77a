# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and termination signals end a run after its current step, or at once if there is nothing to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """The user interrupted the run. It continues from the last checkpoint, if there is one."""

    def __init__(self, step: int, steps: int | None = None) -> None:
        """Args: the step that the run continues from, and how many it has (None: not known yet)."""
        of = "" if steps is None else f" of {steps}"
        super().__init__(f"stopped at step {step}{of}; the same command continues it")


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that files and processes are closed."""

    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or a termination signal arrives; a second signal interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    with _handled(note, signal.SIGINT, signal.SIGTERM):
        yield caught


@contextmanager
def _handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Send signals to a handler, in the main thread only: in others, as in Ray's workers, nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
