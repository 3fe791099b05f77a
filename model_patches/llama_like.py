# SPDX-License-Identifier: Apache-2.0
"""Adapter for vLLM's own decoders: layers take positions, hidden states and a residual,
which the final norm adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.sequence import IntermediateTensors

from vllm_ppd.model_patches.base import Adapter, CutState

if TYPE_CHECKING:
    from vllm_ppd.model_patches.base import ModelCut


class LlamaLikeAdapter(Adapter):
    """Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, Phi-3, GLM-4, Llama 4, gpt-oss."""

    has_residual = True

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        # The decoder's method, not the embedding table: Gemma scales embeddings here.
        return self.decoder.embed_input_ids(input_ids)

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> CutState:
        for layer in layers:
            # Arguments go by name: gpt-oss takes them in another order.
            hidden, residual = layer(
                positions=positions, hidden_states=hidden, residual=residual
            )
        return hidden, residual

    def norm(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self.decoder.norm(hidden, residual)[0]

    def replace_forward(self, cut: ModelCut) -> None:
        def forward(
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: IntermediateTensors | None = None,
            inputs_embeds: torch.Tensor | None = None,
            **_: Any,
        ) -> torch.Tensor | IntermediateTensors:
            state = None
            if intermediate_tensors is not None:
                state = (
                    intermediate_tensors["hidden_states"],
                    intermediate_tensors["residual"],
                )
            output = cut.forward(input_ids, positions, state, inputs_embeds)
            if isinstance(output, torch.Tensor):
                return output
            return IntermediateTensors(
                {"hidden_states": output[0], "residual": output[1]}
            )

        # The stacks are compiled, so the decoder around them must not be.
        self.decoder.do_not_compile = True
        self.decoder.forward = forward
