# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on; the message is one line with what is wrong, where, and what to do instead."""

from vllm_ppd.heads.quote import shortened


class UserError(ValueError):
    """Bad input; the command ends with this message, which has a bounded length and prints on any terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class HeadsError(UserError):
    """A heads folder that cannot be used."""


class MissingFile(HeadsError):
    """A file that is missing from a heads folder."""


class TrainingError(UserError):
    """Bad data or options of training, calibration or `ppd data`, or a run that cannot continue."""
