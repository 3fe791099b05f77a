# SPDX-License-Identifier: Apache-2.0
"""A record of a data file: text, a chat in one of the usual layouts, a prompt with or without completion, or ids."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened

TEXT_PARTS = {"text", "input_text", "output_text"}
ROLES = {  # of ShareGPT and its relatives, as chat templates name them
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
CHAT_COLUMNS = ("messages", "conversations")
MOST_IDS = 1 << 31
NEEDED = "'text', 'messages' or 'conversations' (a chat), 'prompt', or 'prompt_token_ids'"


class Skipped(Exception):
    """A record that is left out and counted; the message is the reason, which records share."""


@dataclass(frozen=True)
class Document:
    """A text, or its token ids where they were given."""

    text: str = ""
    is_chat: bool = False  # rendered by the chat template, which writes the special tokens itself
    ids: list[int] | None = None
    prompt: str | None = None  # what the model is to continue: a chat up to its last user turn, or a given prompt
    responses: tuple[tuple[int, int], ...] | None = None  # where the text is the model's to write; None: unknown
    prompt_tokens: int | None = None  # of `ids`, where the record says what follows its prompt
    cut_off: bool = False  # the response goes on where the document ends
    category: str = ""  # of the record's column of that name

    @property
    def asks(self) -> bool:
        """Whether it says what the model is to continue."""
        return self.prompt is not None or self.ids is not None


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content` strings, which a chat template makes a document."""

    messages: list[dict[str, Any]]
    system: str | None = None  # system prompt, where the messages have none
    tools: list[Any] | None = None
    category: str = ""

    @property
    def asks(self) -> bool:
        """Whether it says what the model is to continue: it has a user's turn."""
        return any(message["role"] == "user" for message in self.messages)


def parse_record(record: Any, where: str) -> Document | Chat:
    """What a record holds; of several columns, the first of `prompt_token_ids`, `text`, the chats and `prompt`.

    Args:
        record: a JSON value.
        where: file and line, for errors.

    Raises:
        Skipped: if the record is well formed and has nothing to read.
        TrainingError: if it is malformed.
    """
    columns = {name: value for name, value in record.items() if not _missing(value)} if isinstance(record, dict) else {}
    found = _parse(columns, record, where)
    return replace(found, category=str(columns["category"])) if "category" in columns else found


def _parse(columns: dict[str, Any], record: Any, where: str) -> Document | Chat:
    if "prompt_token_ids" in columns:
        return _tokens(columns, where)
    if "text" in columns:
        if not isinstance(columns["text"], str):
            raise TrainingError(f"{where}: 'text' is of type {type(columns['text']).__name__}; it must be a string")
        return Document(readable(columns["text"]))
    for column in CHAT_COLUMNS:
        if column in columns:
            return _chat(_turns(columns[column], column, where), columns)
    names = set(record) if isinstance(record, dict) else set()
    if "prompt" in columns and ("completion" in columns or "completion" not in names):
        return _prompt(columns, where)
    if names & {"prompt_token_ids", "text", "prompt", *CHAT_COLUMNS}:
        raise Skipped("the text is null")
    found = shortened(", ".join(map(repr, sorted(names))), LONGEST_VALUE) if names else "no columns"
    raise TrainingError(f"{where} has {found}; each record needs {NEEDED}")


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # NaN is pandas' null


def readable(text: str) -> str:
    """A text with characters that can be tokenised, or Skipped."""
    if not text:
        raise Skipped("the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Skipped("a lone surrogate in the text, which is no Unicode character") from None
    return text


def _tokens(columns: dict[str, Any], where: str) -> Document:
    """A prompt as token ids, and the response to it as `ppd data` writes it, or vLLM's completions return it."""
    prompt = _token_ids(columns, "prompt_token_ids", where)
    if not prompt:
        raise Skipped("the text is empty")
    if "token_ids" not in columns:
        return Document(ids=prompt)
    response = _token_ids(columns, "token_ids", where)
    cut_off = columns.get("finish_reason") == "length"
    return Document(ids=prompt + response, prompt_tokens=len(prompt), cut_off=cut_off)


def _token_ids(columns: dict[str, Any], name: str, where: str) -> list[int]:
    ids = columns[name]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < MOST_IDS for i in ids):
        raise TrainingError(f"{where}: no list of token ids under '{name}'")
    return ids


def _prompt(columns: dict[str, Any], where: str) -> Document | Chat:
    """A prompt, alone or with its completion; each is a string or a list of messages."""
    parts = {name: columns[name] for name in ("prompt", "completion") if name in columns}
    if all(isinstance(value, str) for value in parts.values()):
        prompt, text = parts["prompt"], readable("".join(parts.values()))
        return Document(text, prompt=prompt, responses=((len(prompt), len(text)),) if len(parts) > 1 else ())
    messages = []
    for (name, value), role in zip(parts.items(), ("user", "assistant"), strict=False):
        if not isinstance(value, str | list):
            raise TrainingError(f"{where}: '{name}' is of type {type(value).__name__}; it must be a string or a chat")
        messages += _turns([{"role": role, "content": value}] if isinstance(value, str) else value, name, where)
    return _chat(messages, columns)


def _chat(messages: list[dict[str, Any]], columns: dict[str, Any]) -> Chat:
    system, tools = columns.get("system"), columns.get("tools")
    return Chat(messages, system if isinstance(system, str) else None, tools if isinstance(tools, list) else None)


def _turns(messages: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TrainingError(f"{where}: '{column}' must be a list of objects with 'role' and 'content' strings")
    if not messages:
        raise Skipped("a chat without messages")
    return [_turn(message, column, where) for message in messages]


def _turn(message: dict[str, Any], column: str, where: str) -> dict[str, Any]:
    """A message with `role` and `content` strings; ShareGPT calls them `from` and `value`."""
    role = message.get("role") or message.get("from")
    known = "content" in message or "value" in message or message.get("tool_calls")
    if not isinstance(role, str) or not known:
        raise TrainingError(f"{where}: '{column}' must be a list of objects with 'role' and 'content' strings")
    content = message.get("content")
    content = message.get("value") if _missing(content) else content
    if _missing(content):
        if not message.get("tool_calls"):
            raise Skipped("a message without content")
        content = ""
    elif isinstance(content, list):
        content = _joined(content, where)
    elif not isinstance(content, str):
        raise TrainingError(f"{where}: a message's content is of type {type(content).__name__}; it must be a string")
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    if isinstance(calls := message.get("tool_calls"), list):
        others["tool_calls"] = [_with_arguments(call) for call in calls]
    return {**others, "role": ROLES.get(role, role), "content": content}


def _joined(parts: list[Any], where: str) -> str:
    """The text of content parts, a part a line, as vLLM joins them."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            raise Skipped("a message with content that is not text")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise TrainingError(f"{where}: a part of a message's content has no 'text' string")
        texts.append(text)
    return "\n".join(texts)


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, which templates expect; OpenAI's API has them as a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
