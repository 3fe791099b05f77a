# SPDX-License-Identifier: Apache-2.0
"""A record of a data file: text, a chat in one of the usual layouts, a prompt with or without completion, or ids."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened

TEXT_TYPES = {"text", "input_text", "output_text"}  # types of content parts
ROLES = {  # from ShareGPT's names to those of chat templates
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
CHAT_COLUMNS = ("messages", "conversations")
COLUMNS = {"prompt_token_ids", "text", "prompt", *CHAT_COLUMNS}
MOST_IDS = 1 << 31
NEEDED = "'text', 'messages' or 'conversations' (a chat), 'prompt', or 'prompt_token_ids'"


class Skipped(Exception):
    """A record that is skipped and counted; the message is the reason, by which skipped records are grouped."""


class Answer(NamedTuple):
    """A response in a chat, as the model writes it."""

    prompt: str  # the chat before it, as the server would render it
    response: str


@dataclass(frozen=True)
class Document:
    """A text, or its token ids where the record has them."""

    text: str = ""
    is_chat: bool = False  # rendered by the chat template, which writes special tokens itself
    prompt: str | None = None  # what the model continues: a chat up to its last user turn, or the record's prompt
    responses: tuple[tuple[int, int], ...] | None = None  # spans that the model writes; None: a text without prompts
    answers: tuple[Answer, ...] = ()  # of a chat whose text does not hold its responses as the model writes them
    lost: tuple[str, ...] = ()  # for each response that neither of these has, the reason
    continues: bool = False  # whether it is another answer of the chat of the document before it
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None  # the prompt as vLLM's server reads it
    mask: list[bool] | None = None  # which of `ids` the model writes; None: a text without prompts
    cut_off: bool = False  # whether the response goes on after the document's end
    category: str = ""  # from the record's column of that name

    @property
    def asks(self) -> bool:
        """Whether it says what the model is to continue."""
        return self.prompt is not None or self.prompt_ids is not None

    @property
    def has_response(self) -> bool:
        """Whether it has anything that the model writes."""
        spans = self.responses is None or bool(self.responses)
        return bool(self.answers) or (spans if self.mask is None else any(self.mask))

    @property
    def ends_with_response(self) -> bool:
        """Whether nothing but white space follows the last response."""
        if self.responses is not None:
            return bool(self.responses) and self.responses[-1][1] >= len(self.text.rstrip())
        return self.mask is None or self.mask[-1]

    @property
    def asked(self) -> str | Sequence[int]:
        """What its first response answers, or all of it: equal for all answers to the same prompt."""
        if self.answers:
            return self.answers[0].prompt
        if self.responses:
            return self.text[: self.responses[0][0]] or self.text
        if self.prompt_ids is not None and len(self.prompt_ids) > 1:  # a single one begins any text
            return self.prompt_ids
        return self.text or self.ids or ()

    def by_answer(self) -> list[Document]:
        """Documents of one answer each where the text does not hold the answers; else the document."""
        if not self.answers:
            return [self]
        documents: list[Document] = []
        for prompt, response in self.answers:
            text = prompt + response
            spans = ((len(prompt), len(text)),)
            first = not documents
            documents.append(replace(self, text=text, responses=spans, answers=(), lost=(), continues=not first))
        return documents


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content` strings, which a chat template renders as a document."""

    messages: list[dict[str, Any]]
    system: str | None = None  # system prompt, if the messages have none
    tools: list[Any] | None = None
    category: str = ""

    @property
    def asks(self) -> bool:
        """Whether it says what the model is to continue: it has a user's message."""
        return any(message["role"] == "user" for message in self.messages)


def parse_record(record: Any, where: str) -> Document | Chat:
    """Parse a record by its first column among `prompt_token_ids`, `text`, those of chats, and `prompt`.

    Args:
        record: a JSON value.
        where: file and line, for errors.

    Raises:
        Skipped: if the record is well formed and has nothing to read.
        TrainingError: if it is malformed.
    """
    columns = {name: value for name, value in record.items() if not _is_null(value)} if isinstance(record, dict) else {}
    parsed = _parse(columns, record, where)
    return replace(parsed, category=str(columns["category"])) if "category" in columns else parsed


def _parse(columns: dict[str, Any], record: Any, where: str) -> Document | Chat:
    if "prompt_token_ids" in columns:
        return _tokens(columns, where)
    if "text" in columns:
        if not isinstance(columns["text"], str):
            raise _mistyped(where, "'text'", columns["text"])
        return Document(readable(columns["text"]))
    for column in CHAT_COLUMNS:
        if column in columns:
            return _chat(_messages(columns[column], column, where), columns)
    names = set(record) if isinstance(record, dict) else set()
    if "prompt" in columns and ("completion" in columns or "completion" not in names):
        return _prompt(columns, where)
    if names & COLUMNS:
        raise Skipped("the text is null")
    described = shortened(", ".join(map(repr, sorted(names))), LONGEST_VALUE) if names else "no columns"
    raise TrainingError(f"{where} has {described}; each record needs {NEEDED}")


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # NaN is pandas' null


def _mistyped(where: str, name: str, value: Any, needed: str = "a string") -> TrainingError:
    return TrainingError(f"{where}: {name} is of type {type(value).__name__}; it must be {needed}")


def readable(text: str) -> str:
    """A text with characters that can be tokenised, or Skipped."""
    if not text:
        raise Skipped("the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Skipped("a lone surrogate in the text, which is not a Unicode character") from None
    return text


def _tokens(columns: dict[str, Any], where: str) -> Document:
    """A prompt as token ids, and the response to it as `ppd data` writes it, or vLLM's completions return it."""
    ids = {name: columns[name] for name in ("prompt_token_ids", "token_ids") if name in columns}
    for name, values in ids.items():
        if not isinstance(values, list) or not all(type(i) is int and 0 <= i < MOST_IDS for i in values):
            raise TrainingError(f"{where}: no list of token ids under '{name}'")
    prompt = ids["prompt_token_ids"]
    if not prompt:
        raise Skipped("the text is empty")
    response = ids.get("token_ids", [])
    mask = [False] * len(prompt) + [True] * len(response)
    cut_off = columns.get("finish_reason") == "length"
    return Document(ids=prompt + response, prompt_ids=prompt, mask=mask, cut_off=cut_off)


def _prompt(columns: dict[str, Any], where: str) -> Document | Chat:
    """A prompt with or without its completion; each is a string or a list of messages."""
    texts = {name: columns[name] for name in ("prompt", "completion") if name in columns}
    if all(isinstance(value, str) for value in texts.values()):
        prompt, text = texts["prompt"], readable("".join(texts.values()))
        return Document(text, prompt=prompt, responses=((len(prompt), len(text)),) if len(texts) > 1 else ())
    messages = []
    for (name, value), role in zip(texts.items(), ("user", "assistant"), strict=False):
        if not isinstance(value, str | list):
            raise _mistyped(where, f"'{name}'", value, "a string or a chat")
        messages += _messages([{"role": role, "content": value}] if isinstance(value, str) else value, name, where)
    return _chat(messages, columns)


def _chat(messages: list[dict[str, Any]], columns: dict[str, Any]) -> Chat:
    system, tools = columns.get("system"), columns.get("tools")
    return Chat(messages, system if isinstance(system, str) else None, tools if isinstance(tools, list) else None)


def _messages(messages: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TrainingError(f"{where}: '{column}' must be a list of objects with 'role' and 'content' strings")
    if not messages:
        raise Skipped("a chat without messages")
    return [_message(message, column, where) for message in messages]


def _message(message: dict[str, Any], column: str, where: str) -> dict[str, Any]:
    """A message with `role` and `content` strings; ShareGPT calls them `from` and `value`."""
    role, calls = message.get("role") or message.get("from"), message.get("tool_calls")
    if not isinstance(role, str) or not ("content" in message or "value" in message or calls):
        raise TrainingError(f"{where}: '{column}' must be a list of objects with 'role' and 'content' strings")
    content = message.get("content")
    content = message.get("value") if _is_null(content) else content
    if _is_null(content):
        if not calls:
            raise Skipped("a message without content")
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_text(item, where) for item in content)  # as vLLM joins them
    elif not isinstance(content, str):
        raise _mistyped(where, "a message's content", content)
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    if isinstance(calls, list):
        others["tool_calls"] = [_with_arguments(call) for call in calls]
    return {**others, "role": ROLES.get(role, role), "content": content}


def _text(item: Any, where: str) -> str:
    """The text of an item of a message's content."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in TEXT_TYPES:
        raise Skipped("a message with content that is not text")
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise TrainingError(f"{where}: a content part of a message has no 'text' string")
    return text


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates expect, not as OpenAI's JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
