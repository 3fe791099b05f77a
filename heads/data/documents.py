# SPDX-License-Identifier: Apache-2.0
"""The documents of the files that a user names, as text or as the token IDs that vLLM's
server makes.
"""

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

from vllm_ppd.heads.data.files import expand, records
from vllm_ppd.heads.data.records import (
    Answer,
    Chat,
    Document,
    Skipped,
    parse_record,
    readable,
)
from vllm_ppd.heads.data.special_tokens import SpecialTokens
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import LONGEST_VALUE, shortened

BATCH = 64  # documents tokenised at once
LONGEST_SUMMARY = 200  # characters
NO_RESPONSE = "a prompt without a response"
MARK = "\ue000"  # a character that no template writes itself


class Documents:
    """A stream over files that can be read again; records that cannot be used are
    counted and reported.

    Args:
        data: files, and folders of them.
        tokenizer: returns the target's tokenizer; called when a text or a chat needs
            it.
        report: say on stderr how many records are skipped, and why.
        system: system prompt of chats that have none.
        by_answer: give a chat whose template rewrites earlier turns as a document for
            each answer, and leave out records and answers of which nothing is known
            that the model writes.

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
        self.files = expand(data)
        self._load = tokenizer
        self._report = report
        self._system = system
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
                for where, record in records(file):
                    try:
                        document = self._document(record, where)
                    except Skipped as skipped:
                        self.skipped[str(skipped)] += 1
                        continue
                    if not self._by_answer:
                        self.count += 1
                        yield document
                    elif self._counted(document):
                        yield from document.by_answer()
        finally:
            if self._report:
                self.report_skips()

    def _document(self, record: Any, where: str) -> Document:
        parsed = parse_record(record, where)
        if isinstance(parsed, Chat):
            return render(parsed, where, self.tokenizer, self._system)
        return parsed

    def _counted(self, document: Document) -> bool:
        """Whether a document has a response; counts it, and the responses that are lost."""
        self.skipped.update(document.lost)
        if document.has_response:
            self.count += 1
            return True
        if not document.lost:
            self.skipped[NO_RESPONSE] += 1
        return False

    def tokens(self, prompts: bool = False) -> Iterator[Document]:
        """The documents with their token IDs and a mask of the tokens that the model is
        to write.

        Args:
            prompts: also tokenise the records' prompts.
        """
        stream = iter(self)
        while batch := list(itertools.islice(stream, BATCH)):
            for is_chat in (False, True):
                texts = {
                    i: d
                    for i, d in enumerate(batch)
                    if d.ids is None and d.is_chat == is_chat
                }
                if texts:
                    tokenised = self._tokenised(list(texts.values()), is_chat, prompts)
                    batch = [
                        tokenised.pop(0) if i in texts else d
                        for i, d in enumerate(batch)
                    ]
            yield from batch

    def _tokenised(
        self, documents: list[Document], are_chats: bool, prompts: bool
    ) -> list[Document]:
        """Texts, or chats, with their token IDs."""
        settings = {"add_special_tokens": not are_chats, "verbose": False}
        is_fast = bool(getattr(self.tokenizer, "is_fast", False))
        offsets = is_fast and any(document.responses for document in documents)
        texts = [document.text for document in documents]
        encoded = self.tokenizer(texts, **settings, return_offsets_mapping=offsets)
        made = []
        for row, document in enumerate(documents):
            ids = list(encoded["input_ids"][row])
            mask = None
            asked = None
            if prompts and document.prompt:
                asked = self.tokenizer(document.prompt, **settings)["input_ids"]
            if document.responses and not is_fast:
                ids, mask = self._by_piece(document, ids, settings)
            elif document.responses:
                mask = _mask(document.responses, encoded["offset_mapping"][row])
            elif document.responses is not None:
                mask = [False] * len(ids)
            made.append(replace(document, ids=ids, mask=mask, prompt_ids=asked))
        return made

    def _by_piece(
        self, document: Document, ids: list[int], settings: dict[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Token IDs and mask from a tokenizer that does not say where its tokens are in
        the text.

        Args:
            document: with the spans of its responses.
            ids: of the whole text.
            settings: of the tokenizer's calls.

        Returns:
            The IDs of the whole text if tokens end where its responses begin and end;
            else those of its pieces.
        """
        text = document.text
        edges = list(itertools.chain.from_iterable(document.responses or ()))
        before = [
            list(self.tokenizer(text[:edge], **settings)["input_ids"]) for edge in edges
        ]
        if all(ids[: len(some)] == some for some in before):
            counts = [0, *map(len, before), len(ids)]
        else:
            pieces = [
                list(
                    self.tokenizer(text[start:end], add_special_tokens=False)[
                        "input_ids"
                    ]
                )
                for start, end in itertools.pairwise([0, *edges, len(text)])
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
            records = self.count + self.skipped.total()
            tqdm.write(
                f"vllm-ppd: {self.skips()}, of {records} records", file=sys.stderr
            )

    def skips(self) -> str:
        """How many records were skipped and why, in one line; empty if none was."""
        if not self.skipped:
            return ""
        reasons = [
            f"{number} {reason}" for reason, number in self.skipped.most_common(3)
        ]
        if len(self.skipped) > 3:
            reasons.append("and others")
        return shortened(
            f"skipped {self.skipped.total()}: {', '.join(reasons)}", LONGEST_SUMMARY
        )


def _mask(
    spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> list[bool]:
    """Which tokens begin within spans of the text; a token without text counts as the
    one before it.

    Args:
        spans: of characters.
        offsets: first and last character of each token.
    """
    mask: list[bool] = []
    for first, last in offsets:
        if first == last:
            mask.append(bool(mask) and mask[-1])
        else:
            mask.append(any(start <= first < end for start, end in spans))
    return mask


def render(
    chat: Chat, where: str, tokenizer: Any, system: str | None = None
) -> Document:
    """The document of a chat, rendered by the model's chat template.

    Args:
        chat: the messages.
        where: file and line, for errors.
        tokenizer: has the chat template.
        system: system prompt of chats that have none.

    Raises:
        Skipped: if the chat template refuses it.
        TrainingError: if the tokenizer has no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(
            f"{where} is a chat, but this model's tokenizer has no chat template; "
            "give 'text' instead"
        )
    messages = chat.messages
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]

    def rendered(messages: list[dict[str, Any]], asked: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=asked, tools=chat.tools
            )
        )

    try:
        text = rendered(messages)
    except Exception as error:  # a template is a program and may raise anything
        reason = shortened(str(error), LONGEST_VALUE) or type(error).__name__
        raise Skipped(f"the chat template rejects it ({reason})") from None
    roles = [message["role"] for message in messages]
    last = max(
        (i for i, role in enumerate(roles, start=1) if role == "user"), default=0
    )
    try:
        prompt = rendered(messages[:last], asked=True) if last else None
    except Exception:  # it may reject a chat that goes on
        prompt = None
    answers: list[Answer] = []
    lost: list[str] = []
    for index in range(1, len(roles)):
        if roles[index] == "assistant" != roles[index - 1]:
            try:
                answers.append(_answer(messages[: index + 1], rendered))
            except Skipped as skipped:
                lost.append(str(skipped))
    made = Document(
        readable(text),
        is_chat=True,
        prompt=prompt,
        lost=tuple(lost),
        category=chat.category,
    )
    # A template may change a message when the chat goes on, such as dropping its
    # reasoning.
    if all(text.startswith(before + response) for before, response in answers):
        spans = tuple(
            (len(before), len(before) + len(response)) for before, response in answers
        )
        return replace(made, responses=spans)
    return replace(made, responses=(), answers=tuple(answers))


def _answer(messages: list[dict[str, Any]], rendered: Callable[..., str]) -> Answer:
    """The last message as the model writes it: from the end of the prompt that the
    server would read.

    Raises:
        Skipped: if the template does not tell.
    """
    *others, message = messages
    try:
        prompt = rendered(others, asked=True)
        text = rendered(messages).rstrip()
        if text.startswith(prompt) and text != prompt:
            return Answer(prompt, text[len(prompt) :])
        chat = rendered(others)
        marked = rendered([*others, {**message, "content": MARK}])
    except Exception:  # it may reject a chat that goes on
        raise Skipped(
            "an answer in a chat that the chat template rejects before it goes on"
        ) from None
    # A template may begin the answer, as with <think>, and write answers that are given
    # without their reasoning. Then the message itself is what the model goes on with.
    header = prompt.removeprefix(chat)
    content = message["content"].strip()
    stem = header.rstrip()
    begun = next(
        (stem[at:] for at in range(len(stem)) if content.startswith(stem[at:])), ""
    )
    closing = marked.rpartition(MARK)[2].rstrip()
    opening = chat + stem.removesuffix(begun)
    if begun and text.startswith(opening) and text.endswith(closing):
        response = content.removeprefix(begun).removeprefix(header[len(stem) :])
        return Answer(prompt, response + closing)
    raise Skipped(
        "an answer that the chat template does not render as the model writes it"
    )
