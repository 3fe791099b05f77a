# SPDX-License-Identifier: Apache-2.0
"""What is said of heads that are refused: one line, of bounded length, that any terminal can print."""

from __future__ import annotations

LONGEST_MESSAGE = 300  # characters
LONGEST_VALUE = 80


class HeadsError(ValueError):
    """A heads folder that cannot be used; the message is one line: what, where, what to do instead."""

    def __init__(self, message: str) -> None:
        # Names and values of a file may hold line breaks, terminal control sequences and lone surrogates.
        words = " ".join(message.split())
        printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
        super().__init__(shortened(printable, LONGEST_MESSAGE))


class MissingFile(HeadsError):
    """A file that a heads folder should have and has not."""


def shortened(text: str, most: int = LONGEST_VALUE) -> str:
    """The text, its middle left out where it is longer than that many characters."""
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def quoted(value: object) -> str:
    """A value as a message quotes it, in at most 80 characters; of lists and objects their type."""
    if isinstance(value, str):
        return shortened(repr(shortened(value, LONGEST_VALUE - 2)))
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    return f"a {type(value).__name__}"
