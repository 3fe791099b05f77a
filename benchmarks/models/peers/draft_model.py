# SPDX-License-Identifier: Apache-2.0
"""A small Llama with the target's tokenizer, as vLLM's method `draft_model` reads it.

Two layers and two thirds of the demo model's width, trained from nothing on the target's distribution over the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_ppd.benchmarks.models.peers.peer import Peer, PeerOptions
from vllm_ppd.heads.training.recipe import Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

LAYERS, HIDDEN = 2, 128


class DraftModelOptions(PeerOptions):
    """A small model that drafts for a target."""

    kind: ClassVar[str] = "draft_model"

    others_rate: float = Field(3e-3, gt=0, description="peak learning rate of AdamW: embeddings and norms")


class DraftModel(Peer):
    """A Llama of its own."""

    def __init__(self, options: DraftModelOptions, target: Target) -> None:
        super().__init__(options, target)
        theirs = target.config
        config = LlamaConfig(
            vocab_size=theirs.vocab_size, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 64, head_dim=32,
            max_position_embeddings=theirs.max_position_embeddings, tie_word_embeddings=True,
            bos_token_id=theirs.bos_token_id, eos_token_id=theirs.eos_token_id,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config)
        self.to(target.device)

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.model.model.layers.parameters() if p.dim() == 2]

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        teacher = self.logits(self.final_states(batch)).flatten(0, 1)
        output = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        logits = output.logits.float().flatten(0, 1)
        right = (logits.argmax(-1) == teacher.argmax(-1)).sum()
        return functional.cross_entropy(logits, teacher.softmax(-1)), {
            "right": right,
            "known": torch.tensor(len(logits)),
        }

    def config(self) -> dict[str, Any]:
        return self.model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}

    def write(self, out: Path, provenance: str) -> None:
        self.target.tokenizer.save_pretrained(out)
        super().write(out, provenance)
