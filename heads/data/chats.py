# SPDX-License-Identifier: Apache-2.0
"""A chat in the words of the model's chat template: the text, what is to be answered, and where the responses are."""

from __future__ import annotations

from typing import Any

from vllm_ppd.heads.data.records import Chat, Document, Skipped, readable
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened


def render(chat: Chat, where: str, tokenizer: Any, system: str | None = None) -> Document:
    """The document of a chat.

    Args:
        chat: the messages.
        where: file and line, for errors.
        tokenizer: whose chat template is used.
        system: system prompt of chats that have none.

    Raises:
        Skipped: if the chat template refuses it.
        TrainingError: if the tokenizer has no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(f"{where} is a chat, and this model's tokenizer has no chat template; give 'text' instead")
    messages, system = chat.messages, system if chat.system is None else chat.system
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    more = {"tools": chat.tools} if chat.tools else {}

    def rendered(count: int, asked: bool = False) -> str:
        how = {"add_generation_prompt": True} if asked else {}
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, **how, **more))

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
    responses = _responses(text, turns)
    return Document(readable(text), is_chat=True, prompt=prompt, responses=responses, category=chat.category)


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
