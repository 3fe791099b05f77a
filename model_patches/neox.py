# SPDX-License-Identifier: Apache-2.0
"""Adapter for GPT-NeoX, which vLLM serves through its Transformers backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_ppd.model_patches.base import Adapter, CutState

if TYPE_CHECKING:
    from vllm_ppd.model_patches.base import ModelCut


class NeoXAdapter(Adapter):
    """GPT-NeoX: no residual stream beside the hidden states; Transformers' modules want a batch dimension of one."""

    has_residual = False

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.embed_in(input_ids)

    def run(
        self, layers: Sequence[nn.Module], positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> CutState:
        batch, position_ids = hidden[None], positions[None]
        rotary = self.decoder.rotary_emb(batch, position_ids=position_ids)
        for layer in layers:
            batch = layer(batch, attention_mask=None, position_ids=position_ids, position_embeddings=rotary)
        return batch[0], None

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self.decoder.final_layer_norm(hidden)

    def replace_forward(self, cut: ModelCut) -> None:
        def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
            hidden = cut.forward(input_ids[0], position_ids[0])
            assert isinstance(hidden, torch.Tensor)  # one pipeline stage
            return (hidden[None],)

        self.decoder.do_not_compile = True
        self.decoder.forward = forward
