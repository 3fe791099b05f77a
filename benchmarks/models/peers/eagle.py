# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head (Li et al., 2024) for the demo model, as vLLM's method `eagle` reads it.

One decoder layer over fc([embedding of token t+1, state that gave it]) predicts the state that gives token t+2;
embedding and LM head are the target's. Loss: smooth L1 of the states, and a tenth of the cross-entropy to the target's
distribution; uniform noise on the states, as in the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from vllm_ppd.benchmarks.models.peers.target import Peer, Target

NOISE = 0.1  # states get noise from [-NOISE, NOISE]
CLASSIFICATION = 0.1  # weight of the cross-entropy


class Eagle(Peer):
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = target.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one differs.
        self.fc.weight.data = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        layer: Any = LlamaDecoderLayer(target.config, 0)
        layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.layer = layer
        self.rotary: Any = LlamaRotaryEmbedding(target.config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Predicted states [rows, tokens, d] from embeddings and states of that shape."""
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        output = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return output[0] if isinstance(output, tuple) else output

    def predict(self, ids: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        """States [rows, tokens - 1, d]: predicted, and the target's own."""
        hidden = self.target[0].hidden(ids)
        noisy = hidden[:, :-1] + noise * (2 * torch.rand_like(hidden[:, :-1]) - 1)
        return self(self.target[0].model.get_input_embeddings()(ids[:, 1:]), noisy), hidden[:, 1:]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        predicted, wanted = self.predict(ids, NOISE)
        regression = functional.smooth_l1_loss(predicted.float(), wanted.float())
        with torch.no_grad():
            distribution = self.target[0].logits(wanted).float().softmax(-1)
        logits = self.target[0].logits(predicted).float()
        return regression + CLASSIFICATION * functional.cross_entropy(logits.flatten(0, 1), distribution.flatten(0, 1))

    def held_out(self, ids: torch.Tensor) -> dict[str, float]:
        said, meant = (self.target[0].logits(states).argmax(-1) for states in self.predict(ids, 0.0))
        return {"the target's token": float((said == meant).float().mean())}

    def config(self) -> dict[str, Any]:
        return self.target[0].config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {"fc.weight": self.fc.weight, **layer}
