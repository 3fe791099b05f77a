# SPDX-License-Identifier: Apache-2.0
"""The order in which prompts are taken from documents or categories that have several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(rows: Iterable[Sequence[T]]) -> list[T]:
    """The first of each row, then the second of each row that has one, and so on."""
    missing = object()
    turns = itertools.zip_longest(*rows, fillvalue=missing)
    return [value for turn in turns for value in turn if value is not missing]  # type: ignore[misc]


def from_the_middle(pieces: list[T]) -> list[T]:
    """Pieces of a document with the middle one first: the beginnings of documents resemble each other."""
    middle = len(pieces) // 2
    return pieces[middle:] + pieces[:middle]
