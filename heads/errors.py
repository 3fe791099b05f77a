# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on, and the signals that stop a run. The message is one line
with what is wrong, where, and what to do instead.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_ppd.heads.text import quoted, shortened


class UserError(ValueError):
    """Bad input; the command ends with this message, which has a bounded length and
    prints on any terminal.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class HeadsError(UserError):
    """A heads folder that cannot be used."""


class MissingFile(HeadsError):
    """A file that is missing from a heads folder."""


class TrainingError(UserError):
    """Bad data or options of training, calibration or `ppd data`, or a run that cannot continue."""


def refuse_other_options(
    written: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], another: str
) -> None:
    """Raise a TrainingError if the options of a stopped run differ from this one's.

    `written` says what holds the stopped run, such as "--out 'x' was written", and
    `another` what to give instead.
    """
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise TrainingError(
                f"{written} with {name}={quoted(theirs.get(name))}, but this run has "
                f"{quoted(ours.get(name))}: use the same options to continue it, or "
                f"{another}"
            )


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Raise a TrainingError of one line where transformers cannot load a model."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainingError(f"cannot load model {model!r}: {lines[0]}") from None


class Stopped(KeyboardInterrupt):
    """The user interrupted the run, which continues from its last checkpoint.

    Args:
        step: that the run continues from.
        steps: how many it has (None: not known yet).
    """

    def __init__(self, step: int, steps: int | None) -> None:
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
