# SPDX-License-Identifier: Apache-2.0
"""Early heads, which read a draft token from the hidden state at an exit layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vllm_ppd.heads.early.config import EarlyConfig

HeadForm = Literal["transform", "classifier"]


class EarlyHeads(nn.Module):
    """One head per exit layer, over the hidden state at the exit after the target's
    final norm.

    transform:  E^(i) = E* T^(i) (ParaDecode, section 2.1). E* is the target's own LM
                head and is not stored here; T = identity is the untrained exit ("N" in
                PPD's Table 2).
    classifier: a whole E^(i) of its own (PPD's rows "Y"): V x d numbers per exit.
    """

    def __init__(
        self,
        exit_layers: Sequence[int],
        hidden_size: int,
        form: HeadForm = "transform",
        unembedding: torch.Tensor
        | None = None,  # [vocabulary, hidden]: initial weights of classifiers
    ) -> None:
        super().__init__()
        self.exit_layers = tuple(exit_layers)
        self.form = form
        if form == "classifier" and unembedding is None:
            raise ValueError("classifiers start as the target's unembedding; give it")
        start = (
            torch.eye(hidden_size)
            if unembedding is None
            else unembedding.detach().float()
        )
        self.weights = nn.ParameterDict(
            {str(layer): nn.Parameter(start.clone()) for layer in self.exit_layers}
        )

    def forward(
        self,
        hidden: torch.Tensor,  # [rows, hidden], normed
        exit_layer: int,
    ) -> torch.Tensor:
        """T^(i) h for the target's LM head [rows, hidden], or a classifier's logits
        [rows, vocabulary].
        """
        return functional.linear(hidden, self.weights[str(exit_layer)])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by name."""
        return {
            f"exit.{layer}.{self.form}": self.weights[str(layer)].detach()
            for layer in self.exit_layers
        }

    @classmethod
    def from_tensors(
        cls, config: EarlyConfig, tensors: dict[str, torch.Tensor]
    ) -> EarlyHeads:
        """Build from what io.load_tensors has read and checked."""
        names = {layer: f"exit.{layer}.{config.head}" for layer in config.exit_layers}
        start = (
            tensors[names[config.exit_layers[0]]]
            if config.head == "classifier"
            else None
        )
        heads = cls(config.exit_layers, config.target.hidden_size, config.head, start)
        for layer, name in names.items():
            heads.weights[str(layer)] = nn.Parameter(tensors[name])
        return heads
