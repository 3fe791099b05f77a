# SPDX-License-Identifier: Apache-2.0
"""Further decoder layers of the target's own class: DynaMo's token heads inside vLLM.

They are numbered after the target's last layer, so vLLM allocates their KV beside the
target's, in the same blocks: prefix caching, preemption and chunked prefill treat both
alike.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_ppd.model_patches.base import Adapter


def build_layers(
    adapter: Adapter,
    vllm_config: VllmConfig,
    tensors: list[dict[str, torch.Tensor]],
    device: torch.device,
) -> list[nn.Module]:
    """Build one layer per dictionary of weights, which has the names of a decoder layer
    in the target's checkpoint.

    Call this before the KV cache is sized. The layers are not quantised, even if the
    target is.

    Raises:
        ValueError: if weights of a layer are missing or unknown.
    """
    last = adapter.layers[-1]
    prefix = _prefix_of(adapter, last)
    plain = copy.copy(vllm_config)
    plain.quant_config = None
    number = len(adapter.layers)
    layers = []
    with (
        set_current_vllm_config(plain),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        device,
        _longer(vllm_config.model_config.hf_text_config, len(tensors)),
    ):
        for offset, weights in enumerate(tensors):
            layer = _build(type(last), plain, f"{prefix}.{number + offset}")
            _load(layer, weights, adapter.decoder)
            process_weights_after_loading(layer, vllm_config.model_config, device)
            layers.append(layer.eval().requires_grad_(False))
    return layers


def _prefix_of(adapter: Adapter, layer: nn.Module) -> str:
    """The name of the list of layers, such as model.layers."""
    name = next(
        name for name, module in adapter.model.named_modules() if module is layer
    )
    return name.rpartition(".")[0]


def _build(
    cls: type[nn.Module], vllm_config: VllmConfig, prefix: str
) -> nn.Module:
    """Build a layer, from vLLM's whole configuration or from three parts of it, as its
    class requires.
    """
    parameters = inspect.signature(cls.__init__).parameters
    if "vllm_config" in parameters:
        return cls(vllm_config=vllm_config, prefix=prefix)
    return cls(
        config=vllm_config.model_config.hf_text_config,
        cache_config=vllm_config.cache_config,
        quant_config=None,
        prefix=prefix,
    )


def _load(
    layer: nn.Module, weights: dict[str, torch.Tensor], decoder: Any
) -> None:
    loaded = AutoWeightsLoader(layer).load_weights(
        weights.items(), mapper=getattr(decoder, "hf_to_vllm_mapper", None)
    )
    missing = {name for name, _ in layer.named_parameters()} - loaded
    if missing:
        raise ValueError(
            f"token head lacks weights for {sorted(missing)[0]}; the heads are of "
            "another model family"
        )


@contextlib.contextmanager
def _longer(config: Any, layers: int) -> Iterator[None]:
    """Extend layer_types by the last layer's kind, for families whose layers look up
    their kind by number.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        yield
        return
    config.layer_types = [*kinds, *[kinds[-1]] * layers]
    try:
        yield
    finally:
        config.layer_types = kinds
