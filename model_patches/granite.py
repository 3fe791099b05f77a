# SPDX-License-Identifier: Apache-2.0
"""Adapter for Granite: layers that add their residual themselves, and embeddings that
are scaled.
"""

from collections.abc import Sequence

import torch
from torch import nn

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.model_patches.llama_like import LlamaLikeAdapter


class GraniteAdapter(LlamaLikeAdapter):
    """Adapter for Granite."""

    has_residual = False

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (
            self.decoder.embed_input_ids(input_ids)
            * self.decoder.config.embedding_multiplier
        )

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> CutState:
        for layer in layers:
            hidden = layer(positions, hidden)
        return hidden, None

    def norm(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self.decoder.norm(hidden)
