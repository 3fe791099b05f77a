# SPDX-License-Identifier: Apache-2.0
"""Medusa heads (Cai et al., 2024) as vLLM's method `medusa` reads them.

Medusa-1: the target stays frozen; head k reads the state that gave token t+1 and predicts token t+1+k through a
residual block and an LM head of its own, which starts as the target's. The loss of head k counts 0.8^k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_ppd.benchmarks.models.peers.target import Peer
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

DECAY = 0.8


class Medusa(Peer):
    by_muon = False

    def __init__(self, target: Target, heads: int, share: float = 1.0) -> None:
        super().__init__(target, share)
        size, unembedding = target.hidden_size, target.unembedding.detach().float()
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(heads)])
        self.lm_heads = nn.ParameterList([nn.Parameter(unembedding.clone()) for _ in range(heads)])

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Logits of head 0, 1, ... over states [..., d]: [..., V]."""
        block = functional.silu(functional.linear(hidden, self.blocks[head]))
        return functional.linear(hidden + block, self.lm_heads[head])

    def loss(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        losses = []
        for head in range(len(self.blocks)):
            tokens, known = batch.ahead(head + 2)
            rows = self.chosen(known)
            logits = self(hidden.flatten(0, 1)[rows], head).float()
            losses.append(functional.cross_entropy(logits, tokens[rows, -1]))
        return torch.stack([DECAY ** (head + 1) * loss for head, loss in enumerate(losses)]).sum()

    def held_out(self, batch: Batch, hidden: torch.Tensor) -> dict[str, float]:
        found = {}
        for head in range(len(self.blocks)):
            tokens, known = batch.ahead(head + 2)
            said = torch.cat([self(rows, head).argmax(-1) for rows in hidden.flatten(0, 1)[known].split(512)])
            found[f"token {head + 2} right"] = float((said == tokens[known, -1]).float().mean())
        return found

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.blocks[0].shape[0],
            "vocab_size": self.lm_heads[0].shape[0], "num_heads": len(self.blocks), "num_hidden_layers": 1,
            "medusa_fc_bias": False,
        }  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        blocks = {f"blocks.{head}.layers.0.weight": block for head, block in enumerate(self.blocks)}
        return blocks | {f"lm_heads.{head}.weight": weight for head, weight in enumerate(self.lm_heads)}
