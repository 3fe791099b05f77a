# SPDX-License-Identifier: Apache-2.0
"""Prompts of documents: a record's own prompt, or pieces of its text, with the special
tokens that vLLM's server adds.

vLLM tokenises a completion's prompt with special tokens (for many models a BOS token),
and a chat without, since its template has written them already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import TrainingError

T = TypeVar("T")
PROBE = "a"


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token IDs that a tokenizer adds before and after a text."""
    plain = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(PROBE)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if whole[start:end] == plain:
            return whole[:start], whole[end:]
    return [], []


def document_prompts(
    documents: Documents, length: int, stride: int = 1
) -> Iterator[list[list[int]]]:
    """The prompts of each document in turn, as token IDs: the record's own, which may
    have any length, or successive pieces of its text.

    Args:
        documents: users' data.
        length: tokens of a piece of text, special ones included.
        stride: lengths from one piece to the next.

    Raises:
        TrainingError: on a file or a record that is malformed.
    """
    tokenizer = documents.tokenizer
    before, after = special_tokens(tokenizer)
    size = max(1, length - len(before) - len(after))
    for document in documents.tokens():
        if document.prompt_ids is not None:
            yield [document.prompt_ids]
        elif document.prompt:
            encoded = tokenizer(
                document.prompt,
                add_special_tokens=not document.is_chat,
                verbose=False,
            )
            yield [list(encoded["input_ids"])]
        else:
            ids = document.ids or []
            text = ids[len(before) : len(ids) - len(after)]
            starts = range(0, len(text) - size + 1, stride * size)
            pieces = [text[start : start + size] for start in starts]
            yield [[*before, *piece, *after] for piece in pieces]


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
    """The first of each row, then the second of each row that has one, and so on;
    without values that are empty.
    """
    columns = itertools.zip_longest(*rows)
    return [value for column in columns for value in column if value]


def from_the_middle(pieces: list[T]) -> list[T]:
    """Pieces of a document, the middle one first, since the beginnings of documents
    resemble each other.
    """
    middle = len(pieces) // 2
    return pieces[middle:] + pieces[:middle]
