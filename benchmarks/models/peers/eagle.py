# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head (Li et al., 2024) as vLLM's method `eagle` reads it.

One decoder layer over fc([embedding of token t+1, state that gave it]) predicts the state that gives token t+2;
embedding and LM head are the target's. Loss: smooth L1 of the states, and a tenth of the cross-entropy to the target's
distribution; uniform noise on the states, as in the paper.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from vllm_ppd.benchmarks.models.peers.peer import Peer, PeerOptions
from vllm_ppd.heads.training.recipe import Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

NOISE = 0.1  # states get noise from [-NOISE, NOISE]
CLASSIFICATION = 0.1  # weight of the cross-entropy


class EagleOptions(PeerOptions):
    """An EAGLE head on a frozen target."""

    kind: ClassVar[str] = "eagle"


class Eagle(Peer):
    """A decoder layer on the target's states."""

    def __init__(self, options: EagleOptions, target: Target) -> None:
        super().__init__(options, target)
        config: Any = target.config
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one differs.
        self.fc.weight.data = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.layer = layer
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.to(target.device)

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() == 2]

    def predicted(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """The states of all tokens but a window's first [windows, length - 1, d], from the ones before them."""
        noise = NOISE if self.training else 0.0
        states = hidden[:, :-1] + noise * (2 * torch.rand_like(hidden[:, :-1]) - 1)
        x = self.fc(torch.cat([self.target.embed(batch.input_ids[:, 1:]).float(), states], dim=-1))
        positions = batch.position_ids[:, :-1]
        document = (positions == 0).cumsum(1)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = (causal & (document[:, :, None] == document[:, None]))[:, None]
        output = self.layer(
            x, attention_mask=mask, position_embeddings=self.rotary(x, positions), position_ids=positions
        )
        return output[0] if isinstance(output, tuple) else output

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        hidden = self.final_states(batch)
        predicted, wanted = (states.flatten(0, 1) for states in (self.predicted(batch, hidden), hidden[:, 1:]))
        known = batch.ahead(1)[1].view(batch.input_ids.shape)[:, :-1].flatten()
        regression = functional.smooth_l1_loss(predicted[known].float(), wanted[known])
        rows = self.share_of(known, self.options.position_share)
        teacher, logits = self.logits(wanted[rows]), self.logits(predicted[rows])
        right = (teacher.argmax(-1) == logits.argmax(-1)).sum()
        loss = regression + CLASSIFICATION * functional.cross_entropy(logits, teacher.softmax(-1))
        return loss, {"right": right, "known": torch.tensor(len(rows))}

    def config(self) -> dict[str, Any]:
        return self.target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {"fc.weight": self.fc.weight, **layer}
