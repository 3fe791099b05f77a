# SPDX-License-Identifier: Apache-2.0
"""What errors and reports quote of users' files: file and line, and values cut to a readable length."""

from __future__ import annotations

from pathlib import Path

LONGEST = 80  # characters quoted of a value or a path


def quoted(value: str, most: int = LONGEST) -> str:
    """The beginning of a value, in one printable line."""
    text = " ".join(value[: 4 * most].split())
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= most else text[: most - 3] + "..."


def place(file: Path, line: int | None = None) -> str:
    """`file:line`; of a long path, its end."""
    name = "".join(char if char.isprintable() else "?" for char in str(file))
    name = name if len(name) <= LONGEST else "..." + name[3 - LONGEST :]
    return name if line is None else f"{name}:{line}"
