# SPDX-License-Identifier: Apache-2.0
"""A draft vocabulary: only the most frequent tokens are drafted, so drafting reads only their rows of the LM head.

Drafts are verified, so the output is what it was; a token outside is never drafted (as FR-Spec does for draft models).
"""

from __future__ import annotations

import torch

from vllm_ppd.heads.draft_vocabulary import columns, most_frequent
from vllm_ppd.vllm_plugins.integration.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.integration.packed_linear import PackedLinear


class DraftVocabulary:
    """size tokens and their rows of the LM head, whole on every rank.

    Args:
        counts: [vocabulary] how often each token occurs in the heads' training data.
        size: how many tokens.
        lm_head: the target's.
        vllm_config, device: of the engine.
    """

    def __init__(
        self, counts: torch.Tensor, size: int, lm_head: TargetLMHead, vllm_config: object, device: torch.device
    ) -> None:
        self.token_ids = most_frequent(counts, size).to(device)
        self.place_of = columns(self.token_ids, len(counts))
        rows, self.bias = lm_head.rows(self.token_ids, vllm_config, device)
        self.unembedding = PackedLinear(rows, vllm_config, device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, size]"""
        return self.unembedding(hidden) + self.bias

    def spread(self, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Distributions [rows, n, size] over the whole vocabulary, into out [rows, n, vocabulary]."""
        return out.zero_().index_copy_(2, self.token_ids, q.to(out.dtype))
