# SPDX-License-Identifier: Apache-2.0
"""Users' values and file names in messages, shortened and escaped so that a message stays one line."""

import reprlib
from pathlib import Path

LONGEST_VALUE, LONGEST_MESSAGE = 80, 300  # characters

_BOUNDED = reprlib.Repr()  # reads only the part of a value that is shown
_BOUNDED.maxstring = _BOUNDED.maxother = _BOUNDED.maxlong = 2 * LONGEST_VALUE
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = LONGEST_VALUE // 3


def quoted(value: object) -> str:
    """The repr of a value on one line of at most 80 characters."""
    try:
        return _cut(_BOUNDED.repr(value), LONGEST_VALUE)
    except Exception:  # an integer with too many digits, or a __repr__ that fails
        return f"<{_cut(type(value).__name__, LONGEST_VALUE - 2)}>"


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """A text on one printable line of limited length, with its middle left out if it is longer."""
    return _cut(_printable(" ".join(text.split())), most)


def place(file: Path, line: int | None = None) -> str:
    """`file:line`, with only the end of a long path."""
    name = _printable(str(file))
    name = name if len(name) <= LONGEST_VALUE else "..." + name[3 - LONGEST_VALUE :]
    return name if line is None else f"{name}:{line}"


def _printable(text: str) -> str:
    """A text with escapes for what a terminal cannot print or would obey: control sequences, lone surrogates."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _cut(line: str, most: int) -> str:
    if len(line) <= most:
        return line
    head = (most - 3) * 2 // 3
    return f"{line[:head]}...{line[head + 3 - most :]}"
