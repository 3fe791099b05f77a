# SPDX-License-Identifier: Apache-2.0
"""A model with branches: further layers that read the pre-final hidden state, the last
layer's input (DynaMo).

    token ids -> [embed, layers ..L-1] -> pre-final state -> [layer L, norm] -> hidden
                                                          -> [branch: a token head's
                                                          layer, norm] -> hidden

The target stays in one piece, so a forward without the branches takes as long as vLLM's
own. Heads that read the states of several layers need no branch: the forward stores
these states (TappedModel).

The token heads' layers are of the target's own class (build_layers). They are numbered
after the target's last layer, so vLLM allocates their KV beside the target's, in the same
blocks: prefix caching, preemption and chunked prefill treat both alike.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_ppd.model_patches.base import (
    Adapter,
    ModelCut,
    Stack,
    compiled_stack,
)


class TappedModel(ModelCut):
    """A loaded model, in one piece, whose forward keeps the states after some of its
    layers.

    Args:
        model: the causal LM as vLLM loaded it.
        vllm_config: vLLM's configuration.
        layers: ascending layer counts after which the state is kept.
        buffers: [layers, max tokens, hidden], filled with the states by each forward.

    Raises:
        ValueError: if the family cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        layers: Sequence[int],
        buffers: Tensor,
    ) -> None:
        super().__init__(model, vllm_config, (), taps=layers)
        self.buffers = buffers

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As ModelCut.forward; the model is in one pipeline stage."""
        output, *states = super().forward(*args, **kwargs)
        for buffer, state_after in zip(self.buffers, states, strict=True):
            buffer[: len(state_after)].copy_(state_after)
        return output


class Branches(Stack):
    """Further layers that read the same state, compiled as one piece, since starting a
    piece costs host time.
    """

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return each layer's normed hidden states [tokens, hidden], given the
        pre-final state without a residual.
        """
        outputs = []
        for layer in self.layers:
            state = self.adapter.run([layer], positions, hidden.clone(), None)
            outputs.append(self.adapter.norm(*state))
        return tuple(outputs)


class BranchedModel(ModelCut):
    """A loaded model whose forward runs further layers beside its last one.

    Args:
        model: the causal LM as vLLM loaded it.
        vllm_config: vLLM's configuration; its compilation mode also applies to the
            branches.
        embedded: whether forwards are given embeddings in place of token IDs.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, embedded: bool
    ) -> None:
        last = vllm_config.model_config.hf_text_config.num_hidden_layers - 1
        super().__init__(model, vllm_config, (), embedded=embedded, taps=(last,))
        self.has_residual = False  # the branches read a sum
        self.branches: Stack | None = None
        # [branches, max tokens, hidden], their latest output
        self.branch_hidden: Tensor | None = None

    def add_branches(
        self,
        layers: Sequence[nn.Module],
        vllm_config: VllmConfig,
        hidden: Tensor,
    ) -> None:
        """Run further layers in every forward.

        Args:
            layers: layers of the target's kind, one per branch.
            vllm_config: vLLM's configuration.
            hidden: [branches, max tokens, hidden] buffer for the layers' normed hidden
                states.
        """
        first = len(self.adapter.layers)
        self.branches = compiled_stack(
            Branches,
            vllm_config,
            adapter=self.adapter,
            start=first,
            stop=first + len(layers),
            layers=layers,
        )
        self.compiled.append(self.branches)
        self.branch_hidden = hidden

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As ModelCut.forward; the model is in one pipeline stage."""
        output, before = super().forward(input_ids, positions, *args, **kwargs)
        if self.branches is not None and self.branch_hidden is not None:
            if self.graph_buffers is not None:
                # The branches' CUDA graphs may reuse the memory of the target's last
                # graph.
                output = output.clone()
            states = self.branches(
                positions, *self.in_graph_buffers((before, None))
            )
            for hidden, state in zip(self.branch_hidden, states, strict=True):
                hidden[: len(state)].copy_(state)
        return output


def build_layers(
    adapter: Adapter,
    vllm_config: VllmConfig,
    tensors: list[dict[str, Tensor]],
    device: torch.device,
) -> list[nn.Module]:
    """Build one layer per dictionary of weights, which has the names of a decoder layer
    in the target's checkpoint.

    Call this before the KV cache is sized. The layers are not quantized, even if the
    target is.

    Raises:
        ValueError: if weights of a layer are missing or unknown.
    """
    last = adapter.layers[-1]
    names = {module: name for name, module in adapter.model.named_modules()}
    # The name of the list of layers, such as model.layers
    prefix = names[last].rpartition(".")[0]
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


def _load(layer: nn.Module, weights: dict[str, Tensor], decoder: Any) -> None:
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
