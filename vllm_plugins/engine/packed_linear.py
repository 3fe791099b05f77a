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
        self.rows, columns = weight.shape
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), device:
            self.layer = ReplicatedLinear(columns, self.rows, bias=False, params_dtype=dtype, quant_config=None)
        self.layer.weight.data.copy_(weight)
        process_weights_after_loading(self.layer, vllm_config.model_config, device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden)[0]

    def plain(self) -> torch.Tensor | None:
        """The matrix [out, in]; None if the platform has packed it."""
        weight = self.layer.weight
        return weight if weight.dim() == 2 and len(weight) == self.rows else None
