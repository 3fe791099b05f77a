# SPDX-License-Identifier: Apache-2.0
"""Values and files of a user in our messages: a message is one short line, whatever was given."""

import reprlib
from pathlib import Path

LONGEST_VALUE, LONGEST_MESSAGE = 80, 300  # characters

_BOUNDED = reprlib.Repr()  # reads no more of a value than is shown
_BOUNDED.maxstring = _BOUNDED.maxother = _BOUNDED.maxlong = 2 * LONGEST_VALUE
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = LONGEST_VALUE // 3


def quoted(value: object) -> str:
    """A value as Python writes it, on one line of at most 80 characters."""
    try:
        return _cut(_BOUNDED.repr(value), LONGEST_VALUE)
    except Exception:  # an integer of too many digits, or a __repr__ that fails
        return f"<{_cut(type(value).__name__, LONGEST_VALUE - 2)}>"


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """A text on one printable line of at most so many characters; what is left out is in the middle."""
    return _cut(_printable(" ".join(text.split())), most)


def place(file: Path, line: int | None = None) -> str:
    """`file:line`; of a long path, its end."""
    name = _printable(str(file))
    name = name if len(name) <= LONGEST_VALUE else "..." + name[3 - LONGEST_VALUE :]
    return name if line is None else f"{name}:{line}"


def _printable(text: str) -> str:
    """With escapes for what a terminal cannot print or would obey: control sequences, lone surrogates."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _cut(line: str, most: int) -> str:
    if len(line) <= most:
        return line
    head = (most - 3) * 2 // 3
    return f"{line[:head]}...{line[head + 3 - most :]}"
