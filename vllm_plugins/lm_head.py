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

    def rows(
        self, token_ids: torch.Tensor, vllm_config: Any, device: torch.device, chunk: int = 256
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """E* of some tokens [tokens, hidden] and their bias [tokens], on every rank.

        They are read as logits of unit vectors: the LM head itself may be packed, sharded or quantised.

        Raises:
            ValueError: if the model caps its logits, which are then no product of a matrix.
        """
        if self.logits_processor.soft_cap:
            raise ValueError("this model caps its logits, so a part of its LM head cannot be read alone")
        hidden_size, dtype = vllm_config.model_config.hf_text_config.hidden_size, vllm_config.model_config.dtype
        bias = self.logits(torch.zeros(1, hidden_size, dtype=dtype, device=device))[0, token_ids]
        units = torch.eye(hidden_size, dtype=dtype, device=device)
        columns = [(self.logits(part)[:, token_ids] - bias).to(dtype) for part in units.split(chunk)]
        return torch.cat(columns).t().contiguous(), bias.to(dtype)

    def shard(self, classifiers: torch.Tensor) -> torch.Tensor:
        """This rank's rows of classifiers [..., vocabulary, hidden], padded as the LM head is."""
        rows = classifiers[..., self.vocab_start : self.vocab_start + self.num_valid, :]
        return functional.pad(rows, (0, 0, 0, int(self.lm_head.num_embeddings_per_partition) - self.num_valid))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary of sharded logits [..., shard]."""
        if self.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[..., : self.vocab_size]
