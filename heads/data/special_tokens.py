# SPDX-License-Identifier: Apache-2.0
"""The special tokens around served prompts, and prompts cut from documents with the
same tokens.

vLLM tokenises a completion's prompt with special tokens (for many models a BOS token),
and a chat without, since its template has written them already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PROBE = "a"


def control_tokens(tokenizer: Any) -> set[int]:
    """Ids of the tokens that no text has, such as those by which a chat template ends a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        *tokenizer.all_special_ids,
        *(token_id for token_id, token in added.items() if token.special),
    }


class SpecialTokens(NamedTuple):
    """Token ids that a tokenizer adds before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """The special tokens that a tokenizer adds."""
        plain = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        whole = list(tokenizer(PROBE)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return cls(tuple(whole[:start]), tuple(whole[start + len(plain) :]))
        return cls()

    def pieces(
        self, ids: list[int], length: int, stride: int = 1, shorter: bool = False
    ) -> list[list[int]]:
        """Prompts from a document, each with the special tokens around it that the
        document has.

        Args:
            ids: the document.
            length: tokens of a prompt, special ones included.
            stride: lengths from one prompt to the next.
            shorter: take a document that is shorter as one prompt.
        """
        before, after = self._around(ids)
        body = ids[len(before) : len(ids) - len(after)]
        size = length - len(before) - len(after)
        if size < 1:
            return []
        last = len(body) - size
        starts = range(0, max(last, 0) + 1 if shorter else last + 1, stride * size)
        return [[*before, *body[start : start + size], *after] for start in starts]

    def _around(self, ids: list[int]) -> SpecialTokens:
        before = self.before if tuple(ids[: len(self.before)]) == self.before else ()
        rest = ids[len(before) :]
        after = (
            self.after
            if self.after and tuple(rest[-len(self.after) :]) == self.after
            else ()
        )
        return SpecialTokens(before, after)
