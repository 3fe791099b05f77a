# SPDX-License-Identifier: Apache-2.0
"""What is said of heads that are refused: one line, of bounded length, that any terminal can print."""

from __future__ import annotations

from vllm_ppd.heads.quote import shortened


class HeadsError(ValueError):
    """A heads folder that cannot be used; the message is one line: what, where, what to do instead."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class MissingFile(HeadsError):
    """A file that a heads folder should have and has not."""
