# SPDX-License-Identifier: Apache-2.0
"""Early heads: what reads a draft token from the hidden state at an exit layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class EarlyHeads(nn.Module):
    """One lightweight early head an exit layer: E^(i) = E* T^(i) (ParaDecode, section 2.1).

    E* is the target's own LM head and is not stored here; only the d x d matrices T^(i) are. The input is the
    hidden state at the exit after the target's final norm, so T = identity is the untrained exit ("N" in PPD's
    Table 2).
    """

    def __init__(self, exit_layers: Sequence[int], hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.exit_layers = tuple(exit_layers)
        self.hidden_size = hidden_size
        self.transforms = nn.ModuleDict()
        for layer in self.exit_layers:
            transform = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype)
            nn.init.eye_(transform.weight)
            self.transforms[str(layer)] = transform

    def transform(self, exit_layer: int) -> nn.Linear:
        """T^(i) of an exit layer."""
        transform = self.transforms[str(exit_layer)]
        assert isinstance(transform, nn.Linear)
        return transform

    def forward(
        self,
        hidden: torch.Tensor,  # [rows, hidden], normed
        exit_layer: int,
    ) -> torch.Tensor:
        """T^(i) h, ready for the target's LM head: [rows, hidden]."""
        return self.transform(exit_layer)(hidden)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by name."""
        return {f"exit.{layer}.transform": self.transform(layer).weight.detach() for layer in self.exit_layers}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], exit_layers: Sequence[int], hidden_size: int) -> EarlyHeads:
        """Build from a checkpoint's tensors (already checked by heads.checkpoint)."""
        dtype = next(iter(tensors.values())).dtype
        heads = cls(exit_layers, hidden_size, dtype)
        for layer in heads.exit_layers:
            heads.transform(layer).weight.data.copy_(tensors[f"exit.{layer}.transform"])
        return heads
