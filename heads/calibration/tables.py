# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, aligned so that they read in a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with columns padded to their widest cell; numbers stand right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = [("-" * (width - 1) + ":" if right else "-" * width) for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(cells[0]), "| " + " | ".join(rule) + " |", *map(line, cells[1:])])


def percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%x") or "0")
    except ValueError:
        return text in ("", "-")
    return True
