# SPDX-License-Identifier: Apache-2.0
"""Values in messages, on one printable line, and lists of options."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

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


def _split(value: Any) -> Any:
    return (
        tuple(item for item in value.replace(" ", "").split(",") if item)
        if isinstance(value, str)
        else value
    )


COMMAS = BeforeValidator(_split)
Integers = Annotated[tuple[int, ...], COMMAS]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), COMMAS]
Shares = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1), COMMAS
]


def in_words(value: Any) -> str:
    """A JSON value on one line without its brackets: lists with commas, objects as
    `name: value`.
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{name}: {in_words(item)}" for name, item in value.items())
            or "none"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(in_words, value)) or "none"
    return str(value)


def percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns are padded to their widest cell, those of numbers on the left."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    columns = []
    for title, *column in zip(*cells, strict=True):
        width = max(3, len(title), *map(len, column))
        if all(map(_is_number, column)):
            rule = "-" * (width - 1) + ":"
            columns.append(
                [title.rjust(width), rule, *(cell.rjust(width) for cell in column)]
            )
        else:
            columns.append(
                [
                    title.ljust(width),
                    "-" * width,
                    *(cell.ljust(width) for cell in column),
                ]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%x") or "0")
    except ValueError:
        return text == "-"
    return True
