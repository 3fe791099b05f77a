# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end a run after its current step, or at once if there is nothing to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """The user interrupted the run, which continues from its last checkpoint.

    Args:
        step: that the run continues from.
        steps: how many it has (None: not known yet).
    """

    def __init__(self, step: int, steps: int | None = None) -> None:
        of = "" if steps is None else f" of {steps}"
        super().__init__(
            f"stopped at step {step}{of}; the same command continues it"
        )


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that files and processes
    are closed.
    """
    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or SIGTERM arrives; a second signal interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    with _handled(note, signal.SIGINT, signal.SIGTERM):
        yield caught


@contextmanager
def _handled(
    handler: Callable[[int, Any], None], *numbers: int
) -> Iterator[None]:
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python has no handlers there
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
