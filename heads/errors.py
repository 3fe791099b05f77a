# SPDX-License-Identifier: Apache-2.0
"""What is said of heads that are refused: one line, of bounded length, that any terminal can print."""

from __future__ import annotations

from vllm_ppd.heads.quote import shortened


class HeadsError(ValueError):
    """A heads folder that cannot be used; the message is one line: what, where, what to do instead."""

    def __init__(self, message: str) -> None:
        # Names and values of a file may hold line breaks, terminal control sequences and lone surrogates.
        words = " ".join(message.split())
        super().__init__(shortened("".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)))


class MissingFile(HeadsError):
    """A file that a heads folder should have and has not."""
