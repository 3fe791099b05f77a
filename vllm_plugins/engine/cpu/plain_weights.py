# SPDX-License-Identifier: Apache-2.0
"""Keeping the weights of linear layers as loaded, although vLLM's CPU backend would repack them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import functional
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase

from vllm_ppd.vllm_plugins.engine.temporary import temporarily


@contextmanager
def plain_weights() -> Iterator[None]:
    """Within this context a linear layer that has loaded keeps its weight and uses torch's own product.

    vLLM does so itself for layers that it marks; embeddings and the LM head are packed as ever.
    """
    stock = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if isinstance(layer, LinearBase):
            layer.cpu_linear = functional.linear
        else:
            stock(layer, remove_weight)

    with temporarily(utils, dispatch_cpu_unquantized_gemm=dispatch):
        yield
