# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head (Li et al., 2024) for the demo model, as vLLM's method `eagle` reads it.

    python benchmarks/peers/eagle.py                        # build/peers/eagle

One decoder layer over fc([embedding of token t+1, state that gave it]) predicts the state that gives token t+2;
embedding and LM head are the target's. Loss: smooth L1 of the states, and a tenth of the cross-entropy to the target's
distribution; uniform noise on the states, as in the paper.
"""

from __future__ import annotations

import torch
from common import Target, arguments, fit, optimizers_of, save, tell
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

NOISE = 0.1  # states get noise from [-NOISE, NOISE]


class EagleHead(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one differs.
        self.fc.weight.data = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Predicted states [rows, tokens, d] from embeddings and states of that shape."""
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        output = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return output[0] if isinstance(output, tuple) else output

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {"fc.weight": self.fc.weight, **layer}


def main() -> None:
    parser = arguments(__doc__, "eagle", steps=120, learning_rate=1e-3)
    parser.add_argument("--classification", type=float, default=0.1, help="weight of the cross-entropy")
    args = parser.parse_args()
    target = Target(args)
    unembedding = target.model.get_output_embeddings().weight
    embed = target.model.get_input_embeddings()
    head = EagleHead(target.config)

    def predict(ids: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = target.hidden(ids)
        noisy = hidden[:, :-1] + noise * (2 * torch.rand_like(hidden[:, :-1]) - 1)
        return head(embed(ids[:, 1:]), noisy), hidden[:, 1:]

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        predicted, wanted = predict(ids, NOISE)
        regression = functional.smooth_l1_loss(predicted.float(), wanted.float())
        with torch.no_grad():
            distribution = functional.linear(wanted, unembedding).float().softmax(-1)
        logits = functional.linear(predicted, unembedding).float()
        return regression + args.classification * functional.cross_entropy(
            logits.flatten(0, 1), distribution.flatten(0, 1)
        )

    matrices = [p for p in head.parameters() if p.dim() == 2]
    seconds = fit(target, args, optimizers_of(head, matrices, args), loss_of)
    with torch.no_grad():
        predicted, wanted = predict(target.held_out(), 0.0)
        said, meant = (functional.linear(states, unembedding).argmax(-1) for states in (predicted, wanted))
    config = target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    save(args.out, config, head.tensors())
    tell(args, seconds, {"the target's token": round((said == meant).float().mean().item(), 4)})


if __name__ == "__main__":
    main()
