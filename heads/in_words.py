# SPDX-License-Identifier: Apache-2.0
"""Readable forms of stored values: words on a line, and Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any


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
