# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on; the message is one line with what is wrong, where, and
what to do instead.
"""

from collections.abc import Iterator, Mapping
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
                f"{quoted(ours.get(name))}: give the same options to continue it, or "
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
