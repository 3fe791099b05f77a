# SPDX-License-Identifier: Apache-2.0
"""Prompts of documents: a record's own prompt, or pieces of its text, tokenised as by
vLLM's server.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import TrainingError

T = TypeVar("T")


class DocumentPrompts(NamedTuple):
    """The prompts of a document as token ids."""

    ids: list[list[int]]  # prompts from a record, or successive pieces of its text
    is_asked: bool  # whether the record contains a prompt
    category: str


def document_prompts(
    documents: Documents, length: int, stride: int = 1, shorter: bool = False
) -> Iterator[DocumentPrompts]:
    """The prompts of each document in turn; a record's own prompt may have any length.

    Args:
        documents: users' data.
        length: tokens of a piece of text, special ones included.
        stride: lengths from one piece to the next.
        shorter: use a shorter text as one prompt.

    Raises:
        TrainingError: on a file or a record that is malformed.
    """
    for document in documents.tokens(prompts=True):
        if document.prompt_ids is not None:
            yield DocumentPrompts([document.prompt_ids], True, document.category)
        else:
            pieces = documents.special.pieces(
                document.ids or [], length, stride, shorter
            )
            yield DocumentPrompts(pieces, False, document.category)


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that a model does not know.

    Raises:
        TrainingError: if one is not below vocab_size.
    """
    if len(ids) and max(ids) >= vocab_size:
        raise TrainingError(
            f"the data has token id {max(ids)}, but the model has {vocab_size} "
            "tokens; give data for the model's own tokenizer"
        )


def in_turns(rows: Iterable[Sequence[T]]) -> list[T]:
    """The first of each row, then the second of each row that has one, and so on."""
    missing = object()
    columns = itertools.zip_longest(*rows, fillvalue=missing)
    values: Any = itertools.chain.from_iterable(columns)
    return [value for value in values if value is not missing]


def from_the_middle(pieces: list[T]) -> list[T]:
    """Pieces of a document, the middle one first, since the beginnings of documents
    resemble each other.
    """
    middle = len(pieces) // 2
    return pieces[middle:] + pieces[:middle]
