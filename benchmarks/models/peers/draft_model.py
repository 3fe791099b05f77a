# SPDX-License-Identifier: Apache-2.0
"""A small Llama with the demo model's tokenizer, as vLLM's method `draft_model` reads it.

Two layers and two thirds of the target's width, trained from nothing on the target's distribution over the corpus.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_ppd.benchmarks.models.peers.target import Peer
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

LAYERS, HIDDEN = 2, 128


class DraftModel(Peer):
    learning_rate = 3e-3

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        theirs = target.config
        config = LlamaConfig(
            vocab_size=theirs.vocab_size, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 64, head_dim=32,
            max_position_embeddings=theirs.max_position_embeddings, tie_word_embeddings=True,
            bos_token_id=theirs.bos_token_id, eos_token_id=theirs.eos_token_id,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config)

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.model.model.layers.parameters() if p.dim() == 2]

    def loss(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.logits(hidden).float().softmax(-1)
        predicted = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.float()
        return functional.cross_entropy(predicted.flatten(0, 1), wanted.flatten(0, 1))

    def held_out(self, batch: Batch, hidden: torch.Tensor) -> dict[str, float]:
        said = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.argmax(-1)
        return {"the target's token": float((said == self.logits(hidden).argmax(-1)).float().mean())}

    def config(self) -> dict[str, Any]:
        return self.model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}
