# SPDX-License-Identifier: Apache-2.0
"""Medusa heads (Cai et al., 2024) for the demo model, as vLLM's method `medusa` reads them.

    python benchmarks/peers/medusa.py                       # build/peers/medusa

Medusa-1: the target stays frozen; head k reads the state that gave token t+1 and predicts token t+1+k through a
residual block and an LM head of its own, which starts as the target's. The loss of head k counts 0.8^k.
"""

from __future__ import annotations

import torch
from common import Target, arguments, fit, save, tell
from torch import nn
from torch.nn import functional

DECAY = 0.8


class MedusaHeads(nn.Module):
    def __init__(self, heads: int, unembedding: torch.Tensor) -> None:
        super().__init__()
        size = unembedding.shape[1]
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(heads)])
        self.lm_heads = nn.ParameterList([nn.Parameter(unembedding.detach().clone()) for _ in range(heads)])

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Logits of head 0, 1, ... over states [..., d]: [..., V]."""
        return functional.linear(
            hidden + functional.silu(functional.linear(hidden, self.blocks[head])), self.lm_heads[head]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for head in range(len(self.blocks)):
            found[f"blocks.{head}.layers.0.weight"] = self.blocks[head]
            found[f"lm_heads.{head}.weight"] = self.lm_heads[head]
        return found


def main() -> None:
    parser = arguments(__doc__, "medusa", steps=120, learning_rate=1e-3)
    parser.add_argument("--heads", type=int, default=3)
    args = parser.parse_args()
    target = Target(args)
    heads = MedusaHeads(args.heads, target.model.get_output_embeddings().weight)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        hidden = target.hidden(ids)
        losses = [
            functional.cross_entropy(heads(hidden[:, : -2 - k], k).flatten(0, 1).float(), ids[:, 2 + k :].flatten())
            for k in range(args.heads)
        ]
        return torch.stack([DECAY ** (k + 1) * loss for k, loss in enumerate(losses)]).sum()

    seconds = fit(target, args, [torch.optim.AdamW(heads.parameters(), lr=args.learning_rate)], loss_of)
    ids = target.held_out()
    hidden = target.hidden(ids)
    matches = {}
    with torch.no_grad():
        for k in range(args.heads):
            right = heads(hidden[:, : -2 - k], k).argmax(-1) == ids[:, 2 + k :]
            matches[f"token {k + 2} right"] = round(right.float().mean().item(), 4)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size, "num_heads": args.heads, "num_hidden_layers": 1,
        "medusa_fc_bias": False,
    }  # fmt: skip
    save(args.out, config, heads.tensors())
    tell(args, seconds, matches)


if __name__ == "__main__":
    main()
