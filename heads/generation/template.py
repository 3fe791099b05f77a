# SPDX-License-Identifier: Apache-2.0
"""A chat template seen from the generating side: prompts to answer, and the beginning of a user turn to write."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from vllm_ppd.heads.errors import TrainingError

PLACE = "ppd user turn"  # stands in a rendered chat where the user's words would


@dataclass(frozen=True)
class UserTurn:
    """How a user turn is written: the ids before it, and what ends it."""

    prefix: list[int]
    stop_ids: tuple[int, ...]
    stop_text: str | None  # where the template ends a user turn by plain text


class ChatTemplate:
    """The tokenizer's template with a system prompt.

    Args:
        tokenizer: the target's.
        system: system prompt of chats without one; None leaves that to the template.

    Raises:
        TrainingError: if the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self.tokenizer, self.system = tokenizer, system
        if not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                "--model: this tokenizer has no chat template, so the model cannot write user turns; give --prompts "
                "with files of text"
            )

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids that vLLM's server reads for a chat that the assistant is to continue."""
        return self._ids(self._text(messages))

    def user_turn(self) -> UserTurn:
        """The beginning of a chat, up to the user's first word.

        Raises:
            TrainingError: if the template does not show what the user writes.
        """
        before, found, after = self._text([{"role": "user", "content": PLACE}]).partition(PLACE)
        if not found:
            raise TrainingError("--model: the chat template changes what the user writes; give --prompts")
        ends = {self.tokenizer.eos_token_id} - {None}
        special = set(self.tokenizer.all_special_ids) | set(getattr(self.tokenizer, "added_tokens_decoder", {}))
        following = self._ids(after)
        if following and following[0] in special:
            return UserTurn(self._ids(before), tuple(sorted(ends | {following[0]})), None)
        words = after.split()
        return UserTurn(self._ids(before), tuple(sorted(ends)), words[0] if words else None)

    def key(self, prompt: list[int]) -> bytes:
        """Equal for prompts that differ in case and white space alone."""
        text = " ".join(self.tokenizer.decode(prompt).casefold().split())
        return hashlib.sha256(text.encode()).digest()[:16]

    def _text(self, messages: list[dict[str, Any]]) -> str:
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
