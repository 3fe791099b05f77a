# SPDX-License-Identifier: Apache-2.0
"""A document as token ids, with a mask of those that are the model's to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ppd.heads.data.records import Document

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TokenDocument:
    """Token ids, and which of them are responses."""

    ids: list[int]
    responses: np.ndarray | None = None  # [ids] bool; None: nothing says what is prompt and what is response
    cut_off: bool = False  # the response goes on where the document ends
    prompt: list[int] | None = None  # what the record says is to be answered, as vLLM's server reads it
    category: str = ""  # of the record's column of that name

    def counted(self) -> np.ndarray:
        """Tokens whose prediction heads learn by default: [ids] bool."""
        return np.ones(len(self.ids), dtype=np.bool_) if self.responses is None else self.responses


def given(document: Document) -> TokenDocument | None:
    """A document that is token ids already."""
    if document.ids is None:
        return None
    if document.prompt_tokens is None:
        return TokenDocument(document.ids, prompt=document.ids, category=document.category)
    responses = np.arange(len(document.ids)) >= document.prompt_tokens
    prompt = document.ids[: document.prompt_tokens]
    return TokenDocument(document.ids, responses, document.cut_off, prompt, document.category)


def mask_of(spans: Spans | None, offsets: Sequence[tuple[int, int]] | None, count: int) -> np.ndarray | None:
    """Which tokens begin within spans of the text; those that stand for no text are as the one before.

    Args:
        spans: of characters.
        offsets: first and last character of each token.
        count: of tokens.
    """
    if spans == ():
        return np.zeros(count, dtype=np.bool_)
    if spans is None or offsets is None:
        return None
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    found = np.zeros(len(places), dtype=np.bool_)
    for start, end in spans:
        found |= (places[:, 0] >= start) & (places[:, 0] < end)
    empty = places[:, 0] == places[:, 1]
    last = np.maximum.accumulate(np.where(empty, -1, np.arange(len(places))))
    return np.where(last >= 0, found[last], False)
