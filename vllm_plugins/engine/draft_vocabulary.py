# SPDX-License-Identifier: Apache-2.0
"""A draft vocabulary: only the most frequent tokens are drafted, so drafting reads only their rows of the LM head.

Drafts are verified, so the output does not change; a token outside is never drafted (as FR-Spec does for draft models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_ppd.heads.draft_vocabulary import columns, most_frequent
from vllm_ppd.kernels.sampling import INVALID

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target


class DraftVocabulary:
    """The draft vocabulary's tokens, and their rows of the target's LM head, whole on every rank.

    Args:
        counts: [vocabulary] how often each token occurs in the heads' training data.
        size: how many tokens.
        target: whose LM head is read.
        reads_lm_head: false for heads with their own LM heads.
    """

    def __init__(self, counts: torch.Tensor, size: int, target: Target, reads_lm_head: bool = True) -> None:
        self.token_ids = most_frequent(counts, size).to(target.device)
        self._ids = torch.cat([self.token_ids, self.token_ids.new_tensor([INVALID])])
        self.place_of = columns(self.token_ids, len(counts))
        self.target, self.reads_lm_head = target, reads_lm_head
        if reads_lm_head:
            rows, self.bias = target.lm_head_rows(self.token_ids)
            self.linear = target.linear(rows)

    def refresh(self) -> None:
        """Copy the rows of the LM head again, after its weights have changed."""
        if self.reads_lm_head:
            rows, bias = self.target.lm_head_rows(self.token_ids)
            self.linear.load(rows)
            self.bias.copy_(bias)

    @classmethod
    def of(
        cls, config: DraftingConfig, heads: Any, tensors: dict[str, torch.Tensor], target: Target,
        reads_lm_head: bool = True,
    ) -> DraftVocabulary | None:  # fmt: skip
        """The draft vocabulary of the options, from the heads' token counts; None for the whole vocabulary."""
        if config.draft_vocab_size is None:
            return None
        return cls(tensors[str(heads.counts_tensor)], config.draft_vocab_size, target, reads_lm_head)

    def ids(self, entries: torch.Tensor) -> torch.Tensor:
        """Token IDs of entries; INVALID ones stay."""
        return self._ids[entries]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, size]"""
        return self.linear(hidden) + self.bias
