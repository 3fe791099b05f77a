# SPDX-License-Identifier: Apache-2.0
"""Medusa heads (Cai et al., 2024) for the demo model, as vLLM's method `medusa` reads them.

Medusa-1: the target stays frozen; head k reads the state that gave token t+1 and predicts token t+1+k through a
residual block and an LM head of its own, which starts as the target's. The loss of head k counts 0.8^k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_ppd.benchmarks.models.peers.target import Peer, Target

DECAY = 0.8


class Medusa(Peer):
    by_muon = False

    def __init__(self, target: Target, heads: int) -> None:
        super().__init__(target)
        size, unembedding = target.config.hidden_size, target.unembedding.detach()
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(heads)])
        self.lm_heads = nn.ParameterList([nn.Parameter(unembedding.clone()) for _ in range(heads)])

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Logits of head 0, 1, ... over states [..., d]: [..., V]."""
        block = functional.silu(functional.linear(hidden, self.blocks[head]))
        return functional.linear(hidden + block, self.lm_heads[head])

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.target[0].hidden(ids)
        losses = [
            functional.cross_entropy(self(hidden[:, : -2 - k], k).flatten(0, 1).float(), ids[:, 2 + k :].flatten())
            for k in range(len(self.blocks))
        ]
        return torch.stack([DECAY ** (k + 1) * loss for k, loss in enumerate(losses)]).sum()

    def held_out(self, ids: torch.Tensor) -> dict[str, float]:
        hidden = self.target[0].hidden(ids)
        right = [self(hidden[:, : -2 - k], k).argmax(-1) == ids[:, 2 + k :] for k in range(len(self.blocks))]
        return {f"token {k + 2} right": float(found.float().mean()) for k, found in enumerate(right)}

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.blocks[0].shape[0],
            "vocab_size": self.lm_heads[0].shape[0], "num_heads": len(self.blocks), "num_hidden_layers": 1,
            "medusa_fc_bias": False,
        }  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        blocks = {f"blocks.{head}.layers.0.weight": block for head, block in enumerate(self.blocks)}
        return blocks | {f"lm_heads.{head}.weight": weight for head, weight in enumerate(self.lm_heads)}
