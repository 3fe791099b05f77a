# SPDX-License-Identifier: Apache-2.0
"""A record of a data file: text, a chat in one of the usual layouts, a prompt with its completion, or token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ppd.heads.quote import LONGEST_VALUE, shortened
from vllm_ppd.heads.training import TrainingError

TEXT_PARTS = {"text", "input_text", "output_text"}
ROLES = {  # of ShareGPT and its relatives, as chat templates name them
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
CHAT_COLUMNS = ("messages", "conversations")
MOST_IDS = 1 << 31
WANTED = "'text' (a string), 'messages' or 'conversations' (a chat), or 'prompt' and 'completion'"


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


def read_record(record: Any, where: str, tokenizer: Callable[[], Any], system: str | None = None) -> Document:
    """The document of a record; of several columns, the first of `prompt_token_ids`, `text` and the chats that is set.

    Args:
        record: a JSON value.
        where: file and line, for errors.
        tokenizer: called for its chat template, if the record is a chat.
        system: system prompt of chats that have none.

    Raises:
        Skipped: if the record is well formed and has nothing to read, or the chat template refuses it.
        TrainingError: if it is malformed, or a chat for a tokenizer without a template.
    """
    columns = {name: value for name, value in record.items() if not _missing(value)} if isinstance(record, dict) else {}
    if "prompt_token_ids" in columns:
        return _tokens(columns, where)
    if "text" in columns:
        if not isinstance(columns["text"], str):
            raise TrainingError(f"{where}: 'text' is of type {type(columns['text']).__name__}; it must be a string")
        return Document(_readable(columns["text"]))
    for column in CHAT_COLUMNS:
        if column in columns:
            return _chat(_turns(columns[column], column, where), {"system": system} | columns, where, tokenizer)
    if "prompt" in columns and "completion" in columns:
        return _completion({"system": system} | columns, where, tokenizer)
    names = set(record) if isinstance(record, dict) else set()
    if names & {"prompt_token_ids", "text", *CHAT_COLUMNS} or names >= {"prompt", "completion"}:
        raise Skipped("the text is null")
    found = shortened(", ".join(map(repr, sorted(names))), LONGEST_VALUE) if names else "no columns"
    raise TrainingError(f"{where} has {found}; each record needs {WANTED}")


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # NaN is pandas' null


def _readable(text: str) -> str:
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


def _completion(columns: dict[str, Any], where: str, tokenizer: Callable[[], Any]) -> Document:
    """A prompt and its completion: two strings, two lists of messages, or one of each."""
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        text = _readable(prompt + completion)
        return Document(text, prompt=prompt, responses=((len(prompt), len(text)),))
    messages = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        value = columns[name]
        if not isinstance(value, str | list):
            raise TrainingError(f"{where}: '{name}' is of type {type(value).__name__}; it must be a string or a chat")
        messages += _turns([{"role": role, "content": value}] if isinstance(value, str) else value, name, where)
    return _chat(messages, columns, where, tokenizer)


def _chat(
    messages: list[dict[str, Any]], columns: dict[str, Any], where: str, tokenizer: Callable[[], Any]
) -> Document:
    """Messages in the words of the chat template."""
    template = tokenizer()
    if not getattr(template, "chat_template", None):
        raise TrainingError(f"{where} is a chat, and this model's tokenizer has no chat template; give 'text' instead")
    system, tools = columns.get("system"), columns.get("tools")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    more = {"tools": tools} if isinstance(tools, list) and tools else {}

    def rendered(count: int, asked: bool = False) -> str:
        how = {"add_generation_prompt": True} if asked else {}
        return str(template.apply_chat_template(messages[:count], tokenize=False, **how, **more))

    try:
        text = rendered(len(messages))
    except Exception as error:  # a template is a program, and may raise anything
        reason = shortened(str(error), LONGEST_VALUE) or type(error).__name__
        raise Skipped(f"the chat template refuses it ({reason})") from None
    last = max((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    try:
        prompt = rendered(last, asked=True) if last else None
        turns = [(rendered(i, asked=True), rendered(i + 1)) for i in _answers(messages)]
    except Exception:  # it may refuse a chat that goes on
        prompt, turns = None, []
    return Document(_readable(text), is_chat=True, prompt=prompt, responses=_responses(text, turns))


def _answers(messages: list[dict[str, Any]]) -> list[int]:
    """The assistant's messages that follow another's."""
    roles = [message["role"] for message in messages]
    return [i for i in range(1, len(roles)) if roles[i] == "assistant" != roles[i - 1]]


def _responses(text: str, turns: list[tuple[str, str]]) -> tuple[tuple[int, int], ...] | None:
    """Where the responses of a rendered chat are: from what the server would read before each to the end of its turn.

    None if there is none, or if the template changes a turn once the chat goes on (it may drop its reasoning).
    """
    ends = [(before, after.rstrip()) for before, after in turns]
    if not all(after.startswith(before) and text.startswith(after) for before, after in ends):
        return None
    return tuple((len(before), len(after)) for before, after in ends) or None


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
