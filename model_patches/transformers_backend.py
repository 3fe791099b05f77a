# SPDX-License-Identifier: Apache-2.0
"""Adapter for families that vLLM serves through its Transformers backend: GPT-NeoX,
OLMo 2 and 3, SmolLM3.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_ppd.model_patches.base import Adapter, CutState

if TYPE_CHECKING:
    from vllm_ppd.model_patches.base import ModelCut

NORMS = ("norm", "final_layer_norm")


class TransformersAdapter(Adapter):
    """Adapter without a residual stream; Transformers' modules expect a batch dimension of one."""

    has_residual = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.final_norm: nn.Module = next(
            getattr(self.decoder, name)
            for name in NORMS
            if hasattr(self.decoder, name)
        )
        # OLMo 3 has separate rotary embeddings for sliding-window and full-attention
        # layers.
        by_kind = (
            "layer_type"
            in inspect.signature(self.decoder.rotary_emb.forward).parameters
        )
        self.kinds: list[str] | None = (
            list(self.decoder.config.layer_types) if by_kind else None
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.get_input_embeddings()(input_ids)

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> CutState:
        batch = hidden[None]
        position_ids = positions[None]
        rotary: Any = None
        if self.kinds is None:
            rotary = self.decoder.rotary_emb(batch, position_ids=position_ids)
        for layer in layers:
            if self.kinds is not None:
                kind = self.kinds[layer.self_attn.layer_idx]  # type: ignore[union-attr, index]
                rotary = self.decoder.rotary_emb(batch, position_ids, kind)
            batch = layer(
                batch,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotary,
            )
        return batch[0], None

    def norm(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self.final_norm(hidden)

    def replace_forward(self, cut: ModelCut) -> None:
        def forward(
            input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any
        ) -> tuple[torch.Tensor]:
            hidden = cut.forward(input_ids[0], position_ids[0])
            assert isinstance(hidden, torch.Tensor)  # one pipeline stage
            return (hidden[None],)

        self.decoder.do_not_compile = True
        self.decoder.forward = forward
