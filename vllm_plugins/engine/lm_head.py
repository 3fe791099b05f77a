# SPDX-License-Identifier: Apache-2.0
"""The target's LM head for drafters, across tensor-parallel ranks: its own, or a copy on another stage."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.lora.layers import BaseLayerWithLoRA

from vllm_ppd.vllm_plugins.engine.packed_linear import PackedLinear


class LMHead(ABC):
    """An LM head for any states; each rank holds a shard of the vocabulary, padded to shard_size."""

    tp_size: int
    vocab_size: int
    vocab_start: int
    num_valid: int
    shard_size: int

    @abstractmethod
    def logits(self, hidden: torch.Tensor, gather: bool = True) -> torch.Tensor:
        """E* h: [rows, vocabulary], or this rank's shard of it."""

    def shard(self, classifiers: torch.Tensor) -> torch.Tensor:
        """This rank's rows of classifiers [..., vocabulary, hidden], padded as the LM head is."""
        rows = classifiers[..., self.vocab_start : self.vocab_start + self.num_valid, :]
        return functional.pad(rows, (0, 0, 0, self.shard_size - self.num_valid))

    def all_gather(self, parts: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, concatenated along the last dimension."""
        return tensor_model_parallel_all_gather(parts, dim=-1)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary of sharded logits [..., shard]."""
        if self.tp_size > 1:
            logits = self.all_gather(logits)
        return logits[..., : self.vocab_size]


def without_adapters(layer: Any) -> Any:
    """The layer that vLLM wrapped for LoRA, or the layer itself."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


class TargetLMHead(LMHead):
    """Logits as in vLLM's own step, but without LoRA adapters, which vLLM sets only for the rows of its step."""

    def __init__(self, model: Any) -> None:
        self.lm_head: Any = without_adapters(model.lm_head)
        self.logits_processor: Any = without_adapters(model.logits_processor)
        shard = self.lm_head.shard_indices
        self.tp_size = int(self.lm_head.tp_size)
        self.vocab_size = int(self.logits_processor.org_vocab_size)
        self.vocab_start = int(shard.org_vocab_start_index)
        self.num_valid = int(shard.org_vocab_end_index - shard.org_vocab_start_index)
        self.shard_size = int(self.lm_head.num_embeddings_per_partition)

    def logits(self, hidden: torch.Tensor, gather: bool = True) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden, self.bias, skip_gather=not gather)

    @property
    def bias(self) -> torch.Tensor | None:
        """[shard_size], the parameter itself; None if the LM head has none."""
        return getattr(self.lm_head, "bias", None)

    def rows(
        self, token_ids: torch.Tensor, vllm_config: Any, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """E* of some tokens [tokens, hidden] and their bias [tokens], on every rank.

        Raises:
            ValueError: if the model caps its logits, which are then no product of a matrix.
        """
        return self._read(True, token_ids, vllm_config, device)

    def shard_of_rank(self, vllm_config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """E* of this rank's shard [shard_size, hidden] and its bias [shard_size].

        Raises:
            ValueError: as rows.
        """
        return self._read(False, slice(None), vllm_config, device)

    def _read(
        self,
        gather: bool,
        which: torch.Tensor | slice,
        vllm_config: Any,
        device: torch.device,
        chunk: int = 256,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of some tokens and their bias, read as products, as the LM head may be packed, sharded or quantised.

        Rows are products with unit vectors. These have no bias: a bias would round them, and subtracting it again would
        not restore them.
        """
        if self.logits_processor.soft_cap:
            raise ValueError("this model caps its logits, so a part of its LM head cannot be read separately")
        hidden_size, dtype = vllm_config.model_config.hf_text_config.hidden_size, vllm_config.model_config.dtype
        units = torch.eye(hidden_size, dtype=dtype, device=device)
        columns = []
        for part in units.split(chunk):
            product = self.logits_processor(self.lm_head, part, None, skip_gather=not gather)
            columns.append(product[:, which].to(dtype))
        bias = self.logits(torch.zeros_like(units[:1]), gather)[0, which]
        return torch.cat(columns).t().contiguous(), bias.to(dtype)


class CopiedLMHead(LMHead):
    """The target's LM head on a pipeline stage without one.

    Args:
        shard: [shard_size, hidden] of this rank.
        bias: [shard_size].
        place: vocab_size, vocab_start, num_valid of the shard's rank.
        vllm_config, device: of the engine.
    """

    def __init__(
        self, shard: torch.Tensor, bias: torch.Tensor, place: list[int], vllm_config: Any, device: torch.device
    ) -> None:
        self.vocab_size, self.vocab_start, self.num_valid = place
        self.shard_size = len(shard)
        self.tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
        self.unembedding, self.bias = PackedLinear(shard, vllm_config, device), bias

    def load(self, shard: torch.Tensor, bias: torch.Tensor) -> None:
        """Replace the shard and its bias by others of their shapes."""
        self.unembedding.load(shard)
        self.bias.copy_(bias)

    def logits(self, hidden: torch.Tensor, gather: bool = True) -> torch.Tensor:
        logits = self.unembedding(hidden) + self.bias
        return self.gather(logits) if gather else logits
