# SPDX-License-Identifier: Apache-2.0
"""Adapter for gpt-oss: Llama's build, with the arguments of its layers in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.model_patches.llama_like import LlamaLikeAdapter


class GptOssAdapter(LlamaLikeAdapter):
    """gpt-oss."""

    def run(
        self, layers: Sequence[nn.Module], positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> CutState:
        for layer in layers:
            hidden, residual = layer(hidden, positions, residual)
        return hidden, residual
