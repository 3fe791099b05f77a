# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and termination signals that end a run after its current step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """The user stopped the run; its checkpoint is on disk."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or a termination signal; a second one interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, as in Ray's workers
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
