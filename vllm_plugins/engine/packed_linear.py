# SPDX-License-Identifier: Apache-2.0
"""A matrix of ours as a vLLM linear layer, packed for the platform's fastest product like the target's own."""

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.utils import process_weights_after_loading


class PackedLinear:
    """y = W x, W [out, in] in the target's dtype, whole on every rank."""

    def __init__(self, weight: torch.Tensor, vllm_config: Any, device: torch.device) -> None:
        self.rows = len(weight)
        self.vllm_config, self.device = vllm_config, device
        self.layer = self._packed(weight)

    def _packed(self, weight: torch.Tensor) -> ReplicatedLinear:
        model_config = self.vllm_config.model_config
        rows, columns = weight.shape
        with set_current_vllm_config(self.vllm_config), self.device:
            layer = ReplicatedLinear(columns, rows, bias=False, params_dtype=model_config.dtype, quant_config=None)
        layer.weight.data.copy_(weight)
        process_weights_after_loading(layer, model_config, self.device)
        return layer

    def load(self, weight: torch.Tensor) -> None:
        """Replace the matrix by another one of its shape; CUDA graphs read it from then on, too."""
        plain = self.plain()
        if plain is None:
            self.layer = self._packed(weight)  # packed on a CPU, which has no graphs
        else:
            plain.data.copy_(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden)[0]

    def plain(self) -> torch.Tensor | None:
        """The matrix [out, in]; None if the platform has packed it."""
        weight = self.layer.weight
        return weight if weight.dim() == 2 and len(weight) == self.rows else None
