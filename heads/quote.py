# SPDX-License-Identifier: Apache-2.0
"""Users' values and file names in messages, on one printable line."""

from pathlib import Path

LONGEST_VALUE = 80  # characters
LONGEST_MESSAGE = 300


def quoted(value: object) -> str:
    """The repr of a value, with its middle left out if it is long."""
    return shortened(repr(value), LONGEST_VALUE)


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """A text on one line of at most `most` characters, with its middle left out if it is longer."""
    line = " ".join(text.split())
    # A terminal obeys control sequences.
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    if len(line) <= most:
        return line
    head = (most - 3) * 2 // 3
    return f"{line[:head]}...{line[head + 3 - most :]}"


def place(file: Path, line: int | None = None) -> str:
    """`file` or `file:line`."""
    return str(file) if line is None else f"{file}:{line}"
