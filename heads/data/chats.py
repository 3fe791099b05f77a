# SPDX-License-Identifier: Apache-2.0
"""A chat rendered by the model's chat template: the text, the prompt to answer, and what of it the model writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ppd.heads.data.records import Answer, Chat, Document, Skipped, readable
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened

MARK = "\ue000"  # a character that no template writes itself


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

    def rendered(messages: list[dict[str, Any]], asked: bool = False) -> str:
        settings = {"add_generation_prompt": True} if asked else {}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings, **more))

    try:
        text = rendered(messages)
    except Exception as error:  # a template is a program and may raise anything
        reason = shortened(str(error), LONGEST_VALUE) or type(error).__name__
        raise Skipped(f"the chat template rejects it ({reason})") from None
    roles = [message["role"] for message in messages]
    last = max((i for i, role in enumerate(roles, start=1) if role == "user"), default=0)
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
    known: dict[str, Any] = {"is_chat": True, "prompt": prompt, "lost": tuple(lost), "category": chat.category}
    # A template may change a message when the chat goes on, such as dropping its reasoning.
    if all(text.startswith(before + response) for before, response in answers):
        spans = tuple((len(before), len(before) + len(response)) for before, response in answers)
        return Document(readable(text), responses=spans, **known)
    return Document(readable(text), responses=(), answers=tuple(answers), **known)


def _answer(messages: list[dict[str, Any]], rendered: Callable[..., str]) -> Answer:
    """The last message as the model writes it: from the end of the prompt that the server would read.

    Raises:
        Skipped: if the template does not tell.
    """
    *others, message = messages
    try:
        prompt, text = rendered(others, asked=True), rendered(messages).rstrip()
        if text.startswith(prompt) and text != prompt:
            return Answer(prompt, text[len(prompt) :])
        chat, marked = rendered(others), rendered([*others, {**message, "content": MARK}])
    except Exception:  # it may reject a chat that goes on
        raise Skipped("an answer in a chat that the chat template rejects before it goes on") from None
    # A template may begin the answer, as with <think>, and write answers that are given without their reasoning. Then
    # the message itself is what the model goes on with.
    header, content = prompt.removeprefix(chat), message["content"].strip()
    stem = header.rstrip()
    begun = next((stem[at:] for at in range(len(stem)) if content.startswith(stem[at:])), "")
    closing = marked.rpartition(MARK)[2].rstrip()
    opening = chat + stem.removesuffix(begun)
    if begun and text.startswith(opening) and text.endswith(closing):
        return Answer(prompt, content.removeprefix(begun).removeprefix(header[len(stem) :]) + closing)
    raise Skipped("an answer that the chat template does not render as the model writes it")
