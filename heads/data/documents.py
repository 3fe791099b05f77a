# SPDX-License-Identifier: Apache-2.0
"""All documents of the files that a user names, as text or as the token ids that vLLM's server makes of them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.heads.data.chats import render
from vllm_ppd.heads.data.files import expand, records
from vllm_ppd.heads.data.records import Chat, Document, Skipped, parse_record
from vllm_ppd.heads.data.special_tokens import SpecialTokens
from vllm_ppd.heads.quote import place, shortened

BATCH = 64  # documents tokenised at once
MOST_REASONS = 16  # that are reported individually
LONGEST_SUMMARY = 200  # characters
OTHER = "other reasons"
NO_RESPONSE = "a prompt without a response"


class Documents:
    """A stream over files that can be read again; a record that cannot be used is left out, counted and reported.

    Args:
        data: files, and folders of them.
        tokenizer: returns the target's tokenizer; called when a text or a chat needs it.
        report: say on stderr what is skipped: each reason once, and the numbers at the end.
        system: system prompt of chats that have none.
        by_answer: give a chat whose template rewrites earlier turns as a document for each answer, and leave out
            records and answers of which nothing is known that the model writes.

    Raises:
        TrainingError: if a path holds no text files.
    """

    def __init__(
        self,
        data: Sequence[str | Path],
        tokenizer: Callable[[], Any],
        report: bool = True,
        system: str | None = None,
        by_answer: bool = False,
    ) -> None:
        self.files, self._load, self._report, self._system = expand(data), tokenizer, report, system
        self._by_answer = by_answer
        self.count = 0  # records read
        self.skipped: Counter[str] = Counter()  # records by reason

    def __iter__(self) -> Iterator[Document]:
        """Read the files from the beginning.

        Raises:
            TrainingError: on a file or a record that is malformed; names file and line.
        """
        self.count = 0
        self.skipped.clear()
        try:
            for file in self.files:
                before = self.count + self.skipped.total()
                for where, record in records(file):
                    try:
                        document = parse_record(record, where)
                        if isinstance(document, Chat):
                            document = render(document, where, self.tokenizer, self._system)
                    except Skipped as skipped:
                        self._skip(str(skipped), where)
                        continue
                    if self._by_answer:
                        for reason in document.lost:
                            self._skip(reason, where)
                        if not document.has_response:
                            if not document.lost:
                                self._skip(NO_RESPONSE, where)
                            continue
                    self.count += 1
                    yield from document.by_answer() if self._by_answer else [document]
                if self.count + self.skipped.total() == before:
                    self._skip("an empty file", place(file))
        finally:
            if self._report and self.skipped.total() > len(self.skipped):  # otherwise each was reported individually
                self.report_skips()

    def token_ids(self) -> Iterator[list[int]]:
        """The token ids of each document: of text as vLLM's server reads prompts, special tokens included; of chats as
        their template has them."""
        return (document.ids or [] for document in self.tokens())

    def tokens(self, prompts: bool = False) -> Iterator[Document]:
        """The documents with their token ids and a mask of the tokens that the model is to write.

        Args:
            prompts: also tokenise the records' prompts.
        """
        stream = iter(self)
        while batch := list(itertools.islice(stream, BATCH)):
            for is_chat in (False, True):
                texts = {i: d for i, d in enumerate(batch) if d.ids is None and d.is_chat == is_chat}
                for i, document in zip(texts, self._tokenised(list(texts.values()), is_chat, prompts), strict=True):
                    batch[i] = document
            yield from batch

    def _tokenised(self, documents: list[Document], are_chats: bool, prompts: bool) -> Iterator[Document]:
        """Texts, or chats, with their token ids."""
        if not documents:
            return
        settings = {"add_special_tokens": not are_chats, "verbose": False}
        offsets = bool(getattr(self.tokenizer, "is_fast", False)) and any(d.responses for d in documents)
        encoded = self.tokenizer([d.text for d in documents], **settings, return_offsets_mapping=offsets)
        places = encoded["offset_mapping"] if offsets else itertools.repeat(None, len(documents))
        for document, ids, where in zip(documents, encoded["input_ids"], places, strict=True):
            asked = self.tokenizer(document.prompt, **settings)["input_ids"] if prompts and document.prompt else None
            mask = None
            if document.responses and where is None:
                ids, mask = self._by_piece(document, list(ids), settings)
            elif document.responses is not None:
                mask = _mask(document.responses, where or [], len(ids))
            yield replace(document, ids=list(ids), mask=mask, prompt_ids=asked)

    def _by_piece(self, document: Document, ids: list[int], settings: dict[str, Any]) -> tuple[list[int], list[bool]]:
        """Token ids and mask from a tokenizer that does not say where its tokens are in the text.

        Args:
            document: with the spans of its responses.
            ids: of the whole text.
            settings: of the tokenizer's calls.

        Returns:
            The ids of the whole text if tokens end where its responses begin and end; else those of its pieces.
        """
        text = document.text
        places = list(itertools.chain.from_iterable(document.responses or ()))
        before = [self.tokenizer(text[:place], **settings)["input_ids"] for place in places]
        if all(ids[: len(some)] == list(some) for some in before):
            counts = [0, *map(len, before), len(ids)]
        else:
            bounds = [0, *places, len(text)]
            pieces = [
                list(self.tokenizer(text[start:end], add_special_tokens=False)["input_ids"])
                for start, end in itertools.pairwise(bounds)
            ]
            if not document.is_chat:
                pieces[0] = [*self.special.before, *pieces[0]]
                pieces[-1] = [*pieces[-1], *self.special.after]
            ids = list(itertools.chain.from_iterable(pieces))
            counts = list(itertools.accumulate(map(len, pieces), initial=0))
        mask: list[bool] = []
        for number, (start, end) in enumerate(itertools.pairwise(counts)):
            mask += [number % 2 == 1] * (end - start)
        return ids, mask

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when it is first needed."""
        return self._load()

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens that surround prompts."""
        return SpecialTokens.of(self.tokenizer)

    def report_skips(self) -> None:
        """Say on stderr how many records were skipped and why, if any was."""
        if self.skipped:
            self._say(f"{self.skips()}, of {self.count + self.skipped.total()} records")

    def skips(self) -> str:
        """How many records were skipped and why, in one line; empty if none was."""
        if not self.skipped:
            return ""
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.skipped.most_common(3))
        more = len(self.skipped) - 3
        others = f", and {more} more reasons" if more > 0 else ""
        return shortened(f"skipped {self.skipped.total()}: {reasons}{others}", LONGEST_SUMMARY)

    def _skip(self, reason: str, where: str) -> None:
        if reason not in self.skipped and len(self.skipped) >= MOST_REASONS:
            reason = OTHER
        self.skipped[reason] += 1
        if self.skipped[reason] == 1 and self._report:
            self._say(f"skipped {where}: {reason}")

    @staticmethod
    def _say(text: str) -> None:
        tqdm.write(f"vllm-ppd: {text}", file=sys.stderr)  # without breaking a progress bar


def _mask(spans: tuple[tuple[int, int], ...], offsets: Sequence[tuple[int, int]], count: int) -> list[bool]:
    """Which tokens begin within spans of the text; a token without text counts as the one before it.

    Args:
        spans: of characters.
        offsets: first and last character of each token; not needed without spans.
        count: of tokens.
    """
    if not spans:
        return [False] * count
    mask: list[bool] = []
    for first, last in offsets:
        before = mask[-1] if mask else False
        mask.append(before if first == last else any(start <= first < end for start, end in spans))
    return mask
