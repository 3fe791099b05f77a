# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from a user's files or from user turns that the model writes after its chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions

STRIDE = 4  # distance between prompts from a text, in prompt lengths
PLACE = "ppd user turn"  # placeholder for the user's words in a rendered chat


def read_prompts(options: DataOptions, tokenizer: Any) -> Iterator[list[int]]:
    """Prompts in the files' order: chats up to the last user turn, prompts and token ids as a whole, and
    stretches of --prompt-tokens of texts. Those that leave no room for a response are left out.

    Raises:
        TrainingError: on a file or a record that is malformed, or if there is no prompt.
    """
    documents = Documents(options.prompts, lambda: tokenizer, system=options.system)
    count = 0
    for document in document_prompts(documents, options.prompt_tokens, STRIDE):
        for ids in document.ids:
            if ids and len(ids) < options.max_length:
                count += 1
                yield ids
    if not count:
        skips = f" ({documents.skips()})" if documents.skipped else ""
        raise TrainingError(
            f"--prompts: no record has a prompt of at most {options.max_length - 1} tokens{skips}; give chats, "
            f"prompts, or texts of {options.prompt_tokens} tokens"
        )


def beginning(tokenizer: Any) -> list[int]:
    """The prompt of whole texts, for models without a chat template: the token that begins a text, or ends one.

    Raises:
        TrainingError: if the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise TrainingError("--model: the tokenizer has no chat template, nor a token that begins a text; give --prompts")


class UserTurn(NamedTuple):
    """The token ids before a user turn, and the tokens that end it."""

    prefix: list[int]
    stop_ids: tuple[int, ...]
    stop_text: str | None  # text with which the template ends a user turn, if it is not a token


class ChatTemplate:
    """The tokenizer's chat template with a system prompt.

    Args:
        tokenizer: the target's.
        system: system prompt of chats without one; None leaves that to the template.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self.tokenizer, self.system = tokenizer, system

    def prompt(self, user: str) -> list[int]:
        """The token ids of the prompt that vLLM's server makes of a user's message."""
        return self._ids(self._text(user))

    def user_turn(self) -> UserTurn:
        """The beginning of a chat, up to the user's first word.

        Raises:
            TrainingError: if the rendered chat does not contain the user's message.
        """
        before, shown, after = self._text(PLACE).partition(PLACE)
        if not shown:
            raise TrainingError("--model: the chat template changes what the user writes; give --prompts")
        ends = {self.tokenizer.eos_token_id} - {None}
        special = set(self.tokenizer.all_special_ids) | set(getattr(self.tokenizer, "added_tokens_decoder", {}))
        following = self._ids(after)
        if following and following[0] in special:
            return UserTurn(self._ids(before), tuple(sorted(ends | {following[0]})), None)
        return UserTurn(self._ids(before), tuple(sorted(ends)), next(iter(after.split()), None))

    def key(self, prompt: list[int]) -> bytes:
        """A key that is equal for prompts that differ only in case and white space."""
        text = " ".join(self.tokenizer.decode(prompt).casefold().split())
        return hashlib.sha256(text.encode()).digest()[:16]

    def _text(self, user: str) -> str:
        messages = [{"role": "user", "content": user}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
