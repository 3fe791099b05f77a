# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in one storage, so that tokens at different depths share batched products.

ParaDecode, section 2.2: tokens t1..tN in flight wait for layers l1..lN; one product per projection serves all of them,
and attention runs layer by layer. Each projection of all L layers is one tensor [L, out, in], and vLLM's layers hold
views of it: there is no second copy of the weights, and vLLM's own forward runs over the same storage. Evenly spaced
layers, such as i and i + L/2, are a strided view, so nothing is gathered.

Cost: while a model loads, memory for a copy of its largest projection; on a GPU, nothing else. On the CPU, vLLM
repacks linear weights one by one for its fastest product; packed weights have no views, so the layers keep their plain
weights (plain_weights.py) and every forward, prefill included, uses torch's plain product. For one row on one
AMD EPYC core, that takes as long as the packed product in float32, and 3 to 5 times as long in bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_ppd.kernels.batched_linear import batched_linear

_LINEAR = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


class StackedLayers:
    """The layers of a vLLM decoder built like Llama's, with their weights moved into one storage per projection.

    Args:
        layers: all decoder layers; their parameters become views.

    Raises:
        ValueError: if the layers are not built alike.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers: list[Any] = list(layers)
        self.weights: dict[str, torch.Tensor] = {}  # by parameter: [L, ...]
        for module in (*_LINEAR, *_NORMS):
            for parameter in ("weight", "bias"):
                stack = _stacked(self.layers, f"{module}.{parameter}")
                if stack is not None:
                    self.weights[f"{module}.{parameter}"] = stack
        first = self.layers[0]
        self.attention, self.activation = first.self_attn, first.mlp.act_fn
        self.eps = {name: _module(first, name).variance_epsilon for name in _NORMS if f"{name}.weight" in self.weights}
        if any(layer.self_attn.rotary_emb is not self.attention.rotary_emb for layer in self.layers):
            raise ValueError("layers with rotary embeddings of their own cannot be stacked")

    def __len__(self) -> int:
        return len(self.layers)

    def run_layers(
        self,
        which: slice,  # the layers, ascending
        rows: Sequence[int],  # [layers] number of tokens for each layer; padded to the most
        positions: torch.Tensor,  # [layers, most rows]
        hidden: torch.Tensor,  # [layers, most rows, hidden]
        residual: torch.Tensor,  # as hidden; zeros before the first layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run each layer on its tokens, within a forward context that has metadata for these layers.

        Returns:
            (hidden, residual) after the layers, in the given layout; padding is arbitrary.
        """
        heads, width = self.attention, hidden.shape[:2]
        hidden, residual = self._norm("input_layernorm", which, hidden, residual)
        qkv = self._linear("self_attn.qkv_proj", which, hidden).flatten(0, 1)
        q, k, v = qkv.split([heads.q_size, heads.kv_size, heads.kv_size], dim=-1)
        if "self_attn.q_norm" in self.eps:
            q = self._head_norm("self_attn.q_norm", which, q, width)
            k = self._head_norm("self_attn.k_norm", which, k, width)
        q, k = heads.rotary_emb(positions.flatten(), q, k)
        attended = q.new_zeros(*width, heads.q_size)
        parts = (part.unflatten(0, width) for part in (q, k, v))
        for layer, count, out, *states in zip(self.layers[which], rows, attended, *parts, strict=True):
            out[:count] = layer.self_attn.attn(*(part[:count] for part in states))
        hidden = self._linear("self_attn.o_proj", which, attended)
        hidden, residual = self._norm("post_attention_layernorm", which, hidden, residual)
        hidden = self.activation(self._linear("mlp.gate_up_proj", which, hidden))
        return self._linear("mlp.down_proj", which, hidden), residual

    def _linear(self, name: str, which: slice, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        return batched_linear(x, self.weights[f"{name}.weight"][which], None if bias is None else bias[which])

    def _norm(
        self, name: str, which: slice, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's fused residual addition and RMSNorm, with a weight per layer."""
        total = hidden.float() + residual.float()
        return self._scaled(name, which, total, hidden.dtype), total.to(hidden.dtype)

    def _head_norm(self, name: str, which: slice, x: torch.Tensor, width: torch.Size) -> torch.Tensor:
        """RMSNorm of every head of x [layers * rows, heads * head size]."""
        by_head = x.unflatten(0, width).unflatten(-1, (-1, self.attention.head_dim)).flatten(1, 2)
        return self._scaled(name, which, by_head.float(), x.dtype).reshape(x.shape)

    def _scaled(self, name: str, which: slice, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps[name])
        return x.to(dtype) * self.weights[f"{name}.weight"][which, None]


def _module(layer: nn.Module, name: str) -> Any:
    module: Any = layer
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _stacked(layers: Sequence[nn.Module], name: str) -> torch.Tensor | None:
    """Move a parameter of every layer into one storage [layers, ...]; None where no layer has it."""
    parameters = [_module(layer, name) for layer in layers]
    if all(parameter is None for parameter in parameters):
        return None
    if any(parameter is None or parameter.shape != parameters[0].shape for parameter in parameters):
        raise ValueError(f"layers that differ in {name} cannot be stacked")
    stack = torch.empty(len(layers), *parameters[0].shape, dtype=parameters[0].dtype, device=parameters[0].device)
    for view, parameter in zip(stack, parameters, strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return stack
