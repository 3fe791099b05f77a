# SPDX-License-Identifier: Apache-2.0
"""The documents of the files that a user names, as text or as the token IDs that vLLM's
server makes, and their prompts: a record's own, or pieces of its text.

vLLM tokenizes a completion's prompt with special tokens (for many models a BOS token),
and a chat without, since its template has written them already.
"""

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tqdm import tqdm

from vllm_ppd.heads.data.records import (
    Answer,
    Chat,
    Document,
    Messages,
    Skipped,
    expand,
    parse_record,
    readable,
    records,
)
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import LONGEST_VALUE, StrPath, shortened

BATCH = 64  # documents tokenized at once
LONGEST_SUMMARY = 200  # characters
NO_RESPONSE = "a prompt without a response"
MARK = "\ue000"  # a character that no template writes itself
T = TypeVar("T")
PROBE = "a"  # a text around which special tokens are seen


class Documents:
    """A stream over files that can be read again; records that cannot be used are
    counted and reported.

    Args:
        data: files, and folders of them.
        tokenizer: the target's.
        system: system prompt of chats that have none.
        by_answer: give a chat whose template rewrites earlier turns as a document for
            each answer, and leave out records and answers of which nothing is known
            that the model writes.

    Raises:
        TrainingError: if a path holds no text files.
    """

    def __init__(
        self,
        data: Sequence[StrPath],
        tokenizer: Any,
        system: str | None = None,
        by_answer: bool = False,
    ) -> None:
        self.files = expand(data)
        self.tokenizer = tokenizer
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
                        yield from self._documents(record, where)
                    except Skipped as skipped:
                        self.skipped[str(skipped)] += 1
        finally:
            if self.skipped:
                count = self.count + self.skipped.total()
                skips = f"vllm-ppd: {self.skips()}, of {count} records"
                tqdm.write(skips, file=sys.stderr)

    def _documents(self, record: Any, where: str) -> list[Document]:
        """The documents of a record, which is counted."""
        document = parse_record(record, where)
        category = str(record.get("category", ""))
        if isinstance(document, Chat):
            document = render(document, where, self.tokenizer, self._system)
        document = replace(document, category=category)
        if not self._by_answer:
            self.count += 1
            return [document]
        self.skipped.update(document.lost)
        if document.has_response:
            self.count += 1
            return document.by_answer()
        if document.lost:
            return []
        raise Skipped(NO_RESPONSE)

    def tokens(self) -> Iterator[Document]:
        """The documents with their token IDs and a mask of the tokens that the model is
        to write.
        """
        kinds = itertools.groupby(self, lambda d: (d.ids is not None, d.is_chat))
        for (has_ids, is_chat), documents in kinds:
            if has_ids:
                yield from documents
                continue
            while batch := list(itertools.islice(documents, BATCH)):
                yield from self._tokenized(batch, add_special_tokens=not is_chat)

    def _tokenized(
        self, documents: list[Document], **settings: bool
    ) -> Iterator[Document]:
        """Texts with their token IDs; `settings` are the tokenizer's."""
        texts = [document.text for document in documents]
        is_fast = getattr(self.tokenizer, "is_fast", False)
        encoded = self.tokenizer(
            texts,
            verbose=False,
            return_offsets_mapping=is_fast
            and any(d.responses for d in documents),
            **settings,
        )
        for row, document in enumerate(documents):
            ids = encoded["input_ids"][row]
            mask = None
            if document.responses and is_fast:
                mask = _mask(document.responses, encoded["offset_mapping"][row])
            elif document.responses is not None:
                mask = [False] * len(ids)
                for span in document.responses:
                    first, last = (
                        self._count_before(edge, document.text, ids, settings)
                        for edge in span
                    )
                    mask[first:last] = [True] * (last - first)
            yield replace(document, ids=ids, mask=mask)

    def _count_before(
        self, edge: int, text: str, ids: list[int], settings: dict[str, bool]
    ) -> int:
        """How many of a text's tokens are before a character, by a tokenizer that does
        not say where its tokens are: those that it also makes of the text before.
        """
        before = self.tokenizer(text[:edge], verbose=False, **settings)[
            "input_ids"
        ]
        return len(os.path.commonprefix([ids, before]))

    def skips(self) -> str:
        """How many records were skipped and why, in one line."""
        reasons = [
            f"{count} {reason}" for reason, count in self.skipped.most_common()
        ]
        return shortened(
            f"skipped {self.skipped.total()}: {', '.join(reasons)}",
            LONGEST_SUMMARY,
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
    chat: Chat, where: str, tokenizer: Any, system: str | None
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
            "use 'text' instead"
        )
    messages = chat.messages
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]

    def rendered(messages: Messages, asked: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=asked,
                tools=chat.tools,
            )
        except (
            Exception
        ) as error:  # a template is a program and may raise anything
            reason = shortened(str(error), LONGEST_VALUE) or type(error).__name__
            raise Skipped(f"the chat template rejects it ({reason})") from None

    text = readable(rendered(messages))
    roles = [message["role"] for message in messages]
    prompt = None
    if "user" in roles:
        last = len(roles) - roles[::-1].index("user")
        with contextlib.suppress(Skipped):  # it may reject a chat that goes on
            prompt = rendered(messages[:last], asked=True)
    answers: list[Answer] = []
    lost: list[str] = []
    for index in range(1, len(roles)):
        if roles[index] == "assistant" != roles[index - 1]:
            try:
                answers.append(_answer(messages[: index + 1], rendered))
            except Skipped as skipped:
                lost.append(str(skipped))
    made = Document(text, is_chat=True, prompt=prompt, lost=tuple(lost))
    # A template may change a message when the chat goes on, such as dropping its
    # reasoning.
    spans = []
    for before, response in answers:
        if not text.startswith(before + response):
            return replace(made, responses=(), answers=tuple(answers))
        spans.append((len(before), len(before + response)))
    return replace(made, responses=tuple(spans))


def _answer(messages: Messages, rendered: Callable[..., str]) -> Answer:
    """The last message as the model writes it: from the end of the prompt that the
    server would read.

    Raises:
        Skipped: if the template does not tell, or rejects a chat that goes on.
    """
    *others, message = messages
    prompt = rendered(others, asked=True)
    text = rendered(messages).rstrip()
    if text.startswith(prompt) and text != prompt:
        return Answer(prompt, text[len(prompt) :])
    chat = rendered(others)
    marked = rendered([*others, {**message, "content": MARK}])
    # A template may begin the answer, as with <think>, and write answers that are given
    # without their reasoning. Then the message itself is what the model goes on with.
    header = prompt.removeprefix(chat)
    content = message["content"].strip()
    stem = header.rstrip()
    begun = stem
    while not content.startswith(begun):
        begun = begun[1:]
    closing = marked.rpartition(MARK)[2].rstrip()
    opening = chat + stem.removesuffix(begun)
    if begun and text.startswith(opening) and text.endswith(closing):
        response = content.removeprefix(begun).removeprefix(header[len(stem) :])
        return Answer(prompt, response + closing)
    raise Skipped(
        "an answer that the chat template does not render as the model writes it"
    )


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token IDs that a tokenizer adds before and after a text."""
    plain = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    whole = tokenizer(PROBE)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if whole[start:end] == plain:
            return whole[:start], whole[end:]
    return [], []


def document_prompts(
    documents: Documents, length: int, stride: int = 1
) -> Iterator[tuple[Document, list[list[int]]]]:
    """Each document with its prompts as token IDs: the record's own, which may have any
    length, or successive pieces of its text.

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
            yield document, [document.prompt_ids]
        elif document.prompt:
            encoded = tokenizer(
                document.prompt,
                add_special_tokens=not document.is_chat,
                verbose=False,
            )
            yield document, [encoded["input_ids"]]
        else:
            ids = document.ids or []
            text = ids[len(before) : len(ids) - len(after)]
            starts = range(0, len(text) - size + 1, stride * size)
            pieces = [text[start : start + size] for start in starts]
            yield document, [[*before, *piece, *after] for piece in pieces]


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that a model does not know.

    Raises:
        TrainingError: if one is not below vocab_size.
    """
    if len(ids) and max(ids) >= vocab_size:
        raise TrainingError(
            f"the data has token id {max(ids)}, but the model has {vocab_size} "
            "tokens; use data for the tokenizer of the model"
        )


def in_turns(rows: Iterable[Sequence[T]]) -> list[T]:
    """The first of each row, then the second of each row that has one, and so on;
    without values that are empty.
    """
    columns = itertools.zip_longest(*rows)
    return [value for column in columns for value in column if value]
