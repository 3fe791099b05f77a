# SPDX-License-Identifier: Apache-2.0
"""Values in messages, on one printable line, and lists of options."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

StrPath = str | os.PathLike[str]
LONGEST_VALUE = 80  # characters
LONGEST_MESSAGE = 300


def quoted(value: object) -> str:
    """The repr of a value, with its middle left out if it is long."""
    return shortened(repr(value), LONGEST_VALUE)


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """A text on one line of at most `most` characters, with its middle left out if it is longer."""
    line = " ".join(text.split())
    # A terminal obeys control sequences.
    line = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in line
    )
    if len(line) <= most:
        return line
    head = (most - 3) * 2 // 3
    return f"{line[:head]}...{line[head + 3 - most :]}"


def first_problem(
    error: ValidationError, named: Callable[[str], str] | None = None
) -> str:
    """The first of pydantic's problems, as `field=value: what is wrong`.

    Args:
        error: of a model.
        named: maps the field to its name in the message (default: the path of the
            value).
    """
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be")
    message, _, _ = message.partition(", unable to")
    message = shortened(message, 120)
    if not problem["loc"]:  # the message names the fields
        return message
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path) if named is None else named(path[0])
    if problem["type"] == "missing":
        return f"{field} is required"
    return f"{field}={quoted(problem['input'])}: {message}"


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(item for item in value.replace(" ", "").split(",") if item)


COMMAS = BeforeValidator(_split)
Integers = Annotated[tuple[int, ...], COMMAS]


def in_words(value: Any) -> str:
    """A JSON value on one line without its brackets: lists with commas, objects as
    `name: value`.
    """
    if value in (None, [], (), {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name}: {in_words(item)}" for name, item in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    return str(value)


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table of names, on the left, and numbers."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    first, *others = [
        max(3, *map(len, column)) for column in zip(*cells, strict=True)
    ]
    lines = []
    for name, *numbers in cells:
        lines.append([name.ljust(first), *map(str.rjust, numbers, others)])
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
