# SPDX-License-Identifier: Apache-2.0
"""The records of the files that a user names: chats, prompts with or without a response,
texts, or token IDs.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import LONGEST_VALUE, StrPath, shortened

Messages = list[dict[str, Any]]  # of a chat
COLUMNS = {"messages", "prompt", "text", "prompt_token_ids"}
NEEDED = "'messages' (a chat), 'prompt' with or without 'response', 'text', or 'prompt_token_ids'"
LOOKED_AT = 1024  # records of each file that are checked before a model loads
PIECE = 1 << 18  # characters of a plain text file that make one document
LINES = {".jsonl", ".ndjson"}
RECORDS = {*LINES, ".json"}
FORMS = "pass .jsonl, .json or text files"


class Skipped(Exception):
    """A record that is skipped and counted; the message is the reason, by which records
    are grouped.
    """


class Answer(NamedTuple):
    """A response in a chat, as the model writes it."""

    prompt: str  # the chat before it, as the server would render it
    response: str


@dataclass(frozen=True)
class Document:
    """A text, or its token IDs where the record has them."""

    text: str = ""
    # Rendered by the chat template, which writes special tokens itself
    is_chat: bool = False
    prompt: str | None = (
        None  # a chat up to its last user turn, or the record's prompt
    )
    # Spans of text that the model writes
    responses: tuple[tuple[int, int], ...] | None = None
    answers: tuple[
        Answer, ...
    ] = ()  # of a chat whose text differs from what the model writes
    lost: tuple[
        str, ...
    ] = ()  # for each response that neither of these has, the reason
    # Whether it is another answer of the chat of the document before it
    continues: bool = False
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None  # the prompt as vLLM's server reads it
    mask: list[bool] | None = None  # which of `ids` the model writes
    cut_off: bool = False  # whether the response goes on after the document's end
    category: str = ""  # as the record names it

    @property
    def has_response(self) -> bool:
        """Whether it has anything that the model writes."""
        if self.answers:
            return True
        if self.mask is not None:
            return any(self.mask)
        return self.responses is None or bool(self.responses)

    @property
    def ends_with_response(self) -> bool:
        """Whether nothing but white space follows the last response."""
        if self.responses is not None:
            return bool(self.responses) and self.responses[-1][1] >= len(
                self.text.rstrip()
            )
        return self.mask is None or self.mask[-1]

    @property
    def asked(self) -> str | Sequence[int]:
        """What its first response answers, or all of it: equal for all answers to the
        same prompt.
        """
        if self.answers:
            return self.answers[0].prompt
        if self.responses:
            return self.text[: self.responses[0][0]] or self.text
        if (
            self.prompt_ids is not None and len(self.prompt_ids) > 1
        ):  # a single one begins any text
            return self.prompt_ids
        return self.text or self.ids or ()

    def by_answer(self) -> list[Document]:
        """One document for each of its answers; itself if it has none."""
        documents: list[Document] = []
        for prompt, response in self.answers:
            text = prompt + response
            one = replace(
                self,
                text=text,
                responses=((len(prompt), len(text)),),
                answers=(),
                lost=(),
                continues=bool(documents),
            )
            documents.append(one)
        return documents or [self]


class Chat(NamedTuple):
    """Messages, which a chat template renders as a document."""

    messages: Messages
    tools: list[Any] | None = None


def parse_record(record: Any, where: str) -> Document | Chat:
    """Parse a record by its first column among `prompt_token_ids`, `messages`, `prompt`
    and `text`.

    Args:
        record: a JSON value.
        where: file and line, for errors.

    Raises:
        Skipped: if the record is well formed and has nothing to read.
        TrainingError: if it is malformed.
    """
    if not isinstance(record, dict):
        raise TrainingError(
            f"{where} is no JSON object; each record needs {NEEDED}"
        )
    columns = {name: value for name, value in record.items() if value is not None}
    if "prompt_token_ids" in columns:
        return _tokens(columns, where)
    if "messages" in columns:
        messages = _messages(columns["messages"], "messages", where)
        return Chat(messages, columns.get("tools"))
    if "prompt" in columns:
        return _prompt(columns, where)
    if "text" in columns:
        return Document(readable(_string(columns, "text", where)))
    if COLUMNS & record.keys():
        raise Skipped("the text is null")
    names = ", ".join(map(repr, sorted(record))) or "no columns"
    raise TrainingError(
        f"{where} has {shortened(names, LONGEST_VALUE)}; each record needs {NEEDED}"
    )


def _string(columns: dict[str, Any], name: str, where: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise TrainingError(
            f"{where}: '{name}' is of type {type(value).__name__}; it must be a string"
        )
    return value


def readable(text: str) -> str:
    """A text with characters that can be tokenized, or Skipped."""
    if not text:
        raise Skipped("the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Skipped(
            "a lone surrogate in the text, which is not a Unicode character"
        ) from None
    return text


def _tokens(columns: dict[str, Any], where: str) -> Document:
    """A prompt as token IDs, and the response to it as `ppd data` writes it, or vLLM returns it."""
    for name in ("prompt_token_ids", "token_ids"):
        ids = columns.get(name, [])
        if not isinstance(ids, list) or not all(
            type(i) is int and i >= 0 for i in ids
        ):
            raise TrainingError(f"{where}: no list of token ids under '{name}'")
    prompt = columns["prompt_token_ids"]
    if not prompt:
        raise Skipped("the text is empty")
    response = columns.get("token_ids", [])
    mask = [False] * len(prompt) + [True] * len(response)
    cut_off = columns.get("finish_reason") == "length"
    return Document(
        ids=prompt + response, prompt_ids=prompt, mask=mask, cut_off=cut_off
    )


def _prompt(columns: dict[str, Any], where: str) -> Document | Chat:
    """A prompt with or without its response; both are strings, or both are lists of messages."""
    name = "completion" if "completion" in columns else "response"
    if isinstance(columns["prompt"], list):
        messages = _messages(columns["prompt"], "prompt", where)
        if name in columns:
            messages += _messages(columns[name], name, where)
        return Chat(messages, columns.get("tools"))
    prompt = _string(columns, "prompt", where)
    if name not in columns:
        return Document(readable(prompt), prompt=prompt, responses=())
    text = readable(prompt + _string(columns, name, where))
    span = (len(prompt), len(text))
    return Document(text, prompt=prompt, responses=(span,))


def _messages(messages: Any, column: str, where: str) -> Messages:
    if messages == []:
        raise Skipped("a chat without messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise TrainingError(
            f"{where}: '{column}' must be a list of objects with 'role' and 'content' "
            "strings"
        )
    # Templates add strings: a call of tools has no content.
    return [
        message | {"content": message.get("content") or ""}
        for message in messages
    ]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or bool(
        message.get("tool_calls")
    )


def expand(paths: Sequence[StrPath]) -> list[Path]:
    """The files behind paths, in order. A folder stands for every file in it that is
    not hidden.

    Raises:
        TrainingError: if a path does not exist, or a folder is empty.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            names = glob.glob(
                "**", root_dir=path, recursive=True
            )  # none is hidden
            inside = [
                file
                for file in sorted(map(path.joinpath, names))
                if file.is_file()
            ]
            if not inside:
                raise TrainingError(
                    f"data folder {str(path)!r} holds no files; {FORMS}"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            problem = (
                "is not a regular file" if path.exists() else "does not exist"
            )
            raise TrainingError(
                f"data file {str(path)!r} {problem}; {FORMS}, or folders of them"
            )
    return files


def check_data(paths: Sequence[StrPath]) -> None:
    """Read the beginning of every file. No tokenizer is needed, so bad data is refused
    before a model loads.

    Raises:
        TrainingError: if a file is missing or malformed, or if there is no text. The
            message names the file.
    """
    files = expand(paths)
    has_text = not files
    reason = ""
    for file in files:
        for where, record in itertools.islice(records(file), LOOKED_AT):
            try:
                parse_record(record, where)
            except Skipped as skipped:
                reason = reason or f" ({where}: {skipped})"
            else:
                has_text = True
            if file.suffix not in RECORDS:
                break  # one piece of plain text is enough
    if not has_text:
        names = ", ".join(map(str, files))
        raise TrainingError(f"no text in {names}{reason}; {FORMS} with text")


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, JSON value) of each record; of plain text (file, {"text":
    piece}).

    Raises:
        TrainingError: on what is not JSON or not UTF-8; the message names file and
            line.
    """
    if file.suffix in LINES:
        yield from _lines(file)
    elif file.suffix in RECORDS:
        yield from _array(file)
    else:
        yield from _pieces(file)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                where = f"{file}:{number}"
                yield (
                    where,
                    _parsed(line, where, "each line must be one JSON object"),
                )


def _array(file: Path) -> Iterator[tuple[str, Any]]:
    text = file.read_bytes()
    if not text.strip():
        return
    values = _parsed(text, str(file), "a .json file must be an array of objects")
    if not isinstance(values, list):
        values = [values]
    for number, value in enumerate(values, start=1):
        yield f"{file}, record {number}", value


def _pieces(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig") as handle:
        try:
            while piece := handle.read(PIECE):
                # Up to the end of the line, if it is not too long
                piece += handle.readline(PIECE)
                yield str(file), {"text": piece}
        except UnicodeDecodeError:
            raise TrainingError(
                f"{file} is not UTF-8 text; convert the file, unpack it, or "
                "leave it out"
            ) from None


def _parsed(text: bytes, where: str, needed: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error), LONGEST_VALUE)
        raise TrainingError(f"{where} is not JSON ({reason}); {needed}") from None
