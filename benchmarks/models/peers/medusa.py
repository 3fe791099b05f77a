# SPDX-License-Identifier: Apache-2.0
"""Medusa heads (Cai et al., 2024) as vLLM's method `medusa` reads them.

Medusa-1: the target stays frozen; head k reads the state that gave token t+1 and predicts token t+1+k through a
residual block and an LM head of its own, which starts as the target's. The loss of head k counts 0.8^k.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from vllm_ppd.benchmarks.models.peers.peer import Peer, PeerOptions
from vllm_ppd.heads.training.recipe import Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

DECAY = 0.8


class MedusaOptions(PeerOptions):
    """Medusa heads on a frozen target."""

    kind: ClassVar[str] = "medusa"

    heads: int = Field(3, ge=1, description="tokens after the sampled one, a head each")
    optimizer: Literal["adamw", "muon"] = "adamw"  # LM heads are too large for Muon
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")


class Medusa(Peer):
    """A residual block and an LM head each."""

    def __init__(self, options: MedusaOptions, target: Target) -> None:
        super().__init__(options, target)
        size, unembedding = target.hidden_size, target.unembedding.detach().float()
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(options.heads)])
        self.lm_heads = nn.ParameterList([nn.Parameter(unembedding.clone()) for _ in range(options.heads)])
        self.to(target.device)

    def matrices(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        hidden = self.final_states(batch).flatten(0, 1)
        losses, right, known = [], [], []
        for head, (block, lm_head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            tokens, valid = batch.ahead(head + 2)
            rows = self.share_of(valid, self.options.position_share)
            states = hidden[rows] + functional.silu(functional.linear(hidden[rows], block))
            logits = functional.linear(states, lm_head).float()
            losses.append(DECAY ** (head + 1) * functional.cross_entropy(logits, tokens[rows, -1]))
            right.append((logits.argmax(-1) == tokens[rows, -1]).sum())
            known.append(torch.tensor(len(rows)))
        return torch.stack(losses).sum(), {"right": torch.stack(right), "known": torch.stack(known)}

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        heads = range(len(self.blocks))
        return {f"token {h + 2} right": round(counts[f"right.{h}"] / counts[f"known.{h}"], 4) for h in heads}

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size, "num_heads": len(self.blocks), "num_hidden_layers": 1,
            "medusa_fc_bias": False,
        }  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        blocks = {f"blocks.{head}.layers.0.weight": block for head, block in enumerate(self.blocks)}
        return blocks | {f"lm_heads.{head}.weight": weight for head, weight in enumerate(self.lm_heads)}
