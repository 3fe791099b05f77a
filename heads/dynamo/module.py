# SPDX-License-Identifier: Apache-2.0
"""DynaMo token heads: one extra decoder layer each, fed by the stem (DynaMo, section 3.1)."""

from typing import Any

import torch
from torch import nn


class DynaMoHeads(nn.Module):
    """Token heads 2..n. Head i reads what the target's last decoder layer reads, and
    predicts the token i ahead.

    A head is a decoder layer of the target's own class; the target's final norm and LM
    head follow it, shared by all heads ("the output embeddings reuse the weights of the
    first head"). Head 1 is the target's own last layer.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        # The names of its tensors are those of the checkpoint.
        self.head = nn.ModuleDict(
            {str(token): layer for token, layer in enumerate(layers, start=2)}
        )

    @property
    def tokens(self) -> int:
        """n: tokens of the joint, head 1 included."""
        return len(self.head) + 1

    def forward(
        self, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Head `token`, called as the target's last layer was: its hidden states before
        the final norm.
        """
        output = self.head[str(token)](*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the weights of a checkpoint's tensors."""
        self.load_state_dict({name: tensors[name] for name in self.state_dict()})
