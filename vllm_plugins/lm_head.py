# SPDX-License-Identifier: Apache-2.0
"""The target's LM head as drafters read it, across tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather


class TargetLMHead:
    """Logits as vLLM's own step computes them, of any states; each rank holds a shard of the vocabulary."""

    def __init__(self, model: Any) -> None:
        self.lm_head: Any = model.lm_head
        self.logits_processor: Any = model.logits_processor
        shard = self.lm_head.shard_indices
        self.tp_size = int(self.lm_head.tp_size)
        self.vocab_size = int(self.logits_processor.org_vocab_size)
        self.vocab_start = int(shard.org_vocab_start_index)
        self.num_valid = int(shard.org_vocab_end_index - shard.org_vocab_start_index)

    def logits(self, hidden: torch.Tensor, gather: bool = True) -> torch.Tensor:
        """E* h: [rows, vocabulary], or this rank's shard of it."""
        return self.logits_processor(self.lm_head, hidden, getattr(self.lm_head, "bias", None), skip_gather=not gather)

    def shard(self, classifiers: torch.Tensor) -> torch.Tensor:
        """This rank's rows of classifiers [..., vocabulary, hidden], padded as the LM head is."""
        rows = classifiers[..., self.vocab_start : self.vocab_start + self.num_valid, :]
        return functional.pad(rows, (0, 0, 0, int(self.lm_head.num_embeddings_per_partition) - self.num_valid))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary of sharded logits [..., shard]."""
        if self.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[..., : self.vocab_size]
