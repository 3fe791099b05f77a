# SPDX-License-Identifier: Apache-2.0
"""All documents of the files a user names, as text or as the token ids that vLLM's server makes of them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.heads.data.chats import render
from vllm_ppd.heads.data.files import expand, records
from vllm_ppd.heads.data.records import Chat, Document, Skipped, parse_record
from vllm_ppd.heads.data.special_tokens import NONE, SpecialTokens
from vllm_ppd.heads.data.token_documents import TokenDocument, given, mask_of
from vllm_ppd.heads.quote import place, shortened

BATCH = 64  # documents tokenised at once
MOST_REASONS = 16  # told one by one
LONGEST_SUMMARY = 200  # characters
OTHER = "other reasons"


class Documents:
    """A stream over files that can be read again; a record that cannot be used is left out, counted and reported.

    Args:
        data: files, and folders of them.
        tokenizer: gives the target's tokenizer; called when a text or a chat needs it.
        report: say on stderr what is skipped: each reason once, and the numbers at the end.
        system: system prompt of chats that have none.

    Raises:
        TrainingError: if a path holds no text files.
    """

    def __init__(
        self, data: Sequence[str | Path], tokenizer: Callable[[], Any], report: bool = True, system: str | None = None
    ) -> None:
        self.files, self._load, self._report, self._system = expand(data), tokenizer, report, system
        self.count = 0
        self.skipped: Counter[str] = Counter()  # records by reason
        self._tokenizer: Any = None

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
                for document in self._of(file):
                    self.count += 1
                    yield document
                if self.count + self.skipped.total() == before:
                    self._skip("an empty file", place(file))
        finally:
            if self._report and self.skipped.total() > len(self.skipped):  # else each has been told by itself
                self.tell_skips()

    def token_ids(self) -> Iterator[list[int]]:
        """The token ids of each document: of text as vLLM's server reads prompts, special tokens included; of chats as
        their template has them."""
        return (document.ids for document in self.tokens())

    def tokens(self, prompts: bool = False) -> Iterator[TokenDocument]:
        """The same, with which of the tokens are the model's to write, and with the prompts if they are asked for."""
        stream = iter(self)
        while batch := list(itertools.islice(stream, BATCH)):
            found = [given(document) for document in batch]
            for is_chat in (False, True):
                chosen = [i for i, d in enumerate(batch) if d.ids is None and d.is_chat == is_chat]
                if chosen:
                    encoded = self._encoded([batch[i] for i in chosen], is_chat, prompts)
                    for i, document in zip(chosen, encoded, strict=True):
                        found[i] = document
            yield from (document for document in found if document is not None)

    def _encoded(self, documents: list[Document], are_chats: bool, prompts: bool) -> Iterator[TokenDocument]:
        """Texts, or chats."""
        tokenizer = self.tokenizer()
        how = {"add_special_tokens": not are_chats, "verbose": False}
        offsets = bool(getattr(tokenizer, "is_fast", False)) and any(d.responses for d in documents)
        found = tokenizer([d.text for d in documents], **how, return_offsets_mapping=offsets)
        places = found["offset_mapping"] if offsets else itertools.repeat(None, len(documents))
        asked = {i: d.prompt for i, d in enumerate(documents) if prompts and d.prompt}
        answered = dict(zip(asked, tokenizer(list(asked.values()), **how)["input_ids"] if asked else (), strict=True))
        for i, (document, ids, where) in enumerate(zip(documents, found["input_ids"], places, strict=True)):
            mask = mask_of(document.responses, where, len(ids))
            yield TokenDocument(list(ids), mask, prompt=answered.get(i), category=document.category)

    def tokenizer(self) -> Any:
        """The tokenizer, loaded once."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    @property
    def special(self) -> SpecialTokens:
        """What surrounds prompts; nothing where no text has been read."""
        return NONE if self._tokenizer is None else self._special

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens.of(self.tokenizer())

    def tell_skips(self) -> None:
        """Say on stderr how many records were skipped and why, if any was."""
        if self.skipped:
            self._say(f"{self.skips()}, of {self.count + self.skipped.total()} records")

    def skips(self) -> str:
        """How many records were skipped and why, in one line; empty if none was."""
        if not self.skipped:
            return ""
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.skipped.most_common(3))
        more = len(self.skipped) - 3
        found = f"skipped {self.skipped.total()}: {reasons}" + (f", and {more} reasons more" if more > 0 else "")
        return shortened(found, LONGEST_SUMMARY)

    def _of(self, file: Path) -> Iterator[Document]:
        for where, record in records(file):
            try:
                parsed = parse_record(record, where)
                document = render(parsed, where, self.tokenizer(), self._system) if isinstance(parsed, Chat) else parsed
            except Skipped as skipped:
                self._skip(str(skipped), where)
            else:
                yield document

    def _skip(self, reason: str, where: str) -> None:
        if reason not in self.skipped and len(self.skipped) >= MOST_REASONS:
            reason = OTHER
        self.skipped[reason] += 1
        if self.skipped[reason] == 1 and self._report:
            self._say(f"skipped {where}: {reason}")

    @staticmethod
    def _say(text: str) -> None:
        tqdm.write(f"vllm-ppd: {text}", file=sys.stderr)  # beside a progress bar
