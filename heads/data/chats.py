# SPDX-License-Identifier: Apache-2.0
"""A chat rendered by the model's chat template: the text, the prompt to answer, and the spans of the responses."""

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
        raise TrainingError(f"{where} is a chat, but this model's tokenizer has no chat template; give 'text' instead")
    messages, system = chat.messages, system if chat.system is None else chat.system
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    more = {"tools": chat.tools} if chat.tools else {}

    def rendered(count: int, asked: bool = False) -> str:
        settings = {"add_generation_prompt": True} if asked else {}
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, **settings, **more))

    try:
        text = rendered(len(messages))
    except Exception as error:  # a template is a program and may raise anything
        reason = shortened(str(error), LONGEST_VALUE) or type(error).__name__
        raise Skipped(f"the chat template rejects it ({reason})") from None
    roles = [message["role"] for message in messages]
    last = max((i for i, role in enumerate(roles, start=1) if role == "user"), default=0)
    answers = [i for i in range(1, len(roles)) if roles[i] == "assistant" != roles[i - 1]]
    try:
        prompt = rendered(last, asked=True) if last else None
        # A span reaches from the end of the prompt that the server would read to the end of the response.
        spans = [(rendered(i, asked=True), rendered(i + 1).rstrip()) for i in answers]
    except Exception:  # it may reject a chat that goes on
        prompt, spans = None, []
    responses = None
    # A template may change a message when the chat goes on, such as dropping its reasoning.
    if spans and all(after.startswith(before) and text.startswith(after) for before, after in spans):
        responses = tuple((len(before), len(after)) for before, after in spans)
    return Document(readable(text), is_chat=True, prompt=prompt, responses=responses, category=chat.category)
