# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head (Li et al., 2024) as vLLM's method `eagle` reads it.

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

from vllm_ppd.benchmarks.models.peers.target import Peer
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

NOISE = 0.1  # states get noise from [-NOISE, NOISE]
CLASSIFICATION = 0.1  # weight of the cross-entropy


class Eagle(Peer):
    def __init__(self, target: Target, share: float = 1.0) -> None:
        super().__init__(target, share)
        config: Any = target.config
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one differs.
        self.fc.weight.data = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.layer = layer
        self.rotary: Any = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Predicted states [windows, tokens, d] from embeddings and states of that shape, within documents.

        Args:
            embedded, hidden: [windows, tokens, d].
            positions: [windows, tokens], 0 where a document begins.
        """
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        document = (positions == 0).cumsum(1)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = (causal & (document[:, :, None] == document[:, None]))[:, None]
        output = self.layer(
            x, attention_mask=mask, position_embeddings=self.rotary(x, positions), position_ids=positions
        )
        return output[0] if isinstance(output, tuple) else output

    def predict(self, batch: Batch, hidden: torch.Tensor, noise: float) -> tuple[torch.Tensor, ...]:
        """States [windows, tokens - 1, d], predicted and the target's own, and which of them count [.., ..] bool."""
        noisy = hidden[:, :-1] + noise * (2 * torch.rand_like(hidden[:, :-1]) - 1)
        embedded = self.target.embed(batch.input_ids[:, 1:])
        known = batch.ahead(1)[1].view(batch.input_ids.shape)[:, :-1]
        return self(embedded, noisy, batch.position_ids[:, :-1]), hidden[:, 1:], known

    def loss(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        predicted, wanted, known = self.predict(batch, hidden, NOISE)
        regression = functional.smooth_l1_loss(predicted[known].float(), wanted[known].float())
        rows = self.chosen(known)
        with torch.no_grad():
            distribution = self.logits(wanted.flatten(0, 1)[rows]).float().softmax(-1)
        logits = self.logits(predicted.flatten(0, 1)[rows]).float()
        return regression + CLASSIFICATION * functional.cross_entropy(logits, distribution)

    def held_out(self, batch: Batch, hidden: torch.Tensor) -> dict[str, float]:
        *states, known = self.predict(batch, hidden, 0.0)
        said, meant = (torch.cat([self.logits(rows).argmax(-1) for rows in of[known].split(512)]) for of in states)
        return {"the target's token": float((said == meant).float().mean())}

    def config(self) -> dict[str, Any]:
        return self.target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {"fc.weight": self.fc.weight, **layer}
