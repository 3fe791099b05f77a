# SPDX-License-Identifier: Apache-2.0
"""The cut of a model: its decoder layers as consecutive stacks, each of which can run
separately.

    token ids -> [stack 0: embed, layers 0..e1] -> (hidden, residual) -> ... -> [last
    stack: layers ..L, norm] -> hidden

A multimodal model's forward gets embeddings, so its first stack starts from them.

The whole model is its stacks in a row, so the same compiled pieces serve the full
forward, the shallow passes that draft, and the deep pass that completes deferred KV.
Without CUDA graphs the full forward is one more compiled piece.

Under pipeline parallelism, a process holds only the stacks of its stage; every stage
but the last ends in a state, from which the next stage starts.
"""

from __future__ import annotations

import inspect
import itertools
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index

from vllm_ppd.model_patches.families import MULTIMODAL, adapter_path

# (hidden, residual) at a cut, both [tokens, hidden size]; the residual is None in
# families without one.
CutState = tuple[Tensor, Tensor | None]


class Adapter(ABC):
    """The interface through which a family's model is cut. It holds the loaded model
    and adds no weights.
    """

    has_residual = False

    def __init__(self, model: Any) -> None:
        self.model = model  # the causal LM as vLLM loaded it

    @property
    def decoder(self) -> Any:
        """The decoder module whose forward is replaced by the cut."""
        return self.model.model

    @property
    def layers(self) -> Sequence[nn.Module]:
        """All decoder layers, in order."""
        return self.decoder.layers

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids [tokens] to hidden states [tokens, hidden]."""

    @abstractmethod
    def run(
        self,
        layers: Sequence[nn.Module],
        positions: Tensor,  # [tokens]
        hidden: Tensor,  # [tokens, hidden]
        residual: Tensor | None,
    ) -> CutState:
        """Run consecutive layers."""

    @abstractmethod
    def norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The target's final norm: [tokens, hidden]. May overwrite its inputs."""

    @abstractmethod
    def forward_of(self, cut: ModelCut) -> Any:
        """The decoder's forward as the cut's stacks in a row."""


def adapter_of(model: nn.Module, vllm_config: VllmConfig) -> Adapter:
    """The adapter of a loaded model's family.

    Args:
        model: the causal LM; in a multimodal model, the language model inside it.

    Raises:
        ValueError: if the family cannot be cut.
    """
    names = vllm_config.model_config.architectures
    if names[0] in MULTIMODAL:
        names = [type(model).__name__]
    return resolve_name(adapter_path(names))(model)


class Stack(nn.Module):
    """Consecutive layers [start, stop) of the target; the first stack also embeds, the
    last also applies the norm.

    Args:
        adapter: of the model.
        start, stop: numbers of the layers.
        layers: layers beyond the target's; they are numbered after the target's, and
            their output is normed.
        taps: ascending layer counts; the sums that the layers after them read,
            [tokens, hidden] each, follow the output.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        start: int,
        stop: int,
        layers: Sequence[nn.Module] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.start = start
        self.stop = stop
        self.layers: Sequence[nn.Module] = adapter.layers[start:stop]
        if layers is not None:
            self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.is_last = stop >= len(adapter.layers)
        self.taps = tuple(taps)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
    ) -> Any:
        """The state after the layers, or normed hidden states if they are the last."""
        state: CutState = (hidden, residual)
        tapped = []
        bounds = [0, *self.taps, len(self.layers)]
        for start, stop in itertools.pairwise(bounds):
            state = self.adapter.run(self.layers[start:stop], positions, *state)
            if stop < len(self.layers):
                tapped.append(
                    summed(state)
                )  # vLLM's norms overwrite their inputs
        output = self.adapter.norm(*state) if self.is_last else state
        return (output, *tapped) if tapped else output


class FirstStack(Stack):
    """The stack that starts from token ids."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor
    ) -> Any:
        # Without super(): compiled_stack copies this function without its closure
        hidden = self.adapter.embed(input_ids)
        return Stack.forward(self, positions, hidden, None)


def compiled_stack(
    base: type[Stack], vllm_config: VllmConfig, **kwargs: Any
) -> Stack:
    """Build a stack with vLLM's compilation support.

    vLLM keys compiled code by class and code object; two stacks of one class would run
    each other's layers. Each stack therefore gets a class and a code object of its own.
    """
    numbers = [kwargs["start"], kwargs["stop"], *kwargs.get("taps", ())]
    name = "_".join([base.__name__, *map(str, numbers)])
    code = base.forward.__code__.replace(co_name=name)
    forward = types.FunctionType(code, base.forward.__globals__, name)
    forward.__qualname__ = f"{name}.forward"
    forward.__annotations__ = dict(base.forward.__annotations__)
    tokens_first = dict.fromkeys(inspect.signature(base.forward).parameters, 0)
    del tokens_first["self"]
    cls = type(name, (base,), {"forward": forward, "__module__": base.__module__})
    cls = support_torch_compile(cls, dynamic_arg_dims=tokens_first)
    with set_model_tag(
        name
    ):  # a cache folder of its own, and a name in vLLM's log
        return cls(vllm_config=vllm_config, **kwargs)


def rows_of(state: CutState, index: Tensor | slice) -> CutState:
    """The state of the tokens at an index."""
    return state[0][index], None if state[1] is None else state[1][index]


def summed(state: CutState) -> Tensor:
    """The sum of a state [tokens, hidden], which a layer's norm reads; a layer computes
    the same from (sum, None).
    """
    return state[0].clone() if state[1] is None else state[0] + state[1]


class ModelCut:
    """A loaded model, cut at exit layers.

    Args:
        model: the causal LM as vLLM loaded it.
        vllm_config: vLLM's configuration; its compilation mode also applies to the
            stacks.
        exit_layers: ascending layer counts after which to cut, each inside the stage.
        layers: (first, last + 1) of this pipeline stage; None: all.
        whole: whether to compile the full forward as one more piece: starting a piece
            costs host time, which CUDA graphs hide.
        embedded: whether forwards get embeddings in place of token IDs.
        taps: of the first stack.

    Raises:
        ValueError: if the family cannot be cut or an exit layer is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        exit_layers: Sequence[int],
        layers: tuple[int, int] | None = None,
        whole: bool = False,
        embedded: bool = False,
        taps: Sequence[int] = (),
    ) -> None:
        self.adapter = adapter_of(model, vllm_config)
        self.embedded = embedded
        first, last = layers or (0, len(self.adapter.layers))
        bounds = [first, *exit_layers, last]
        spans = list(itertools.pairwise(bounds))
        if any(start >= stop for start, stop in spans):
            raise ValueError(
                f"exit layers {list(exit_layers)} are not ascending within "
                f"{first + 1}..{last - 1}"
            )
        self.exit_layers = tuple(exit_layers)

        def compiled(start: int, stop: int) -> Stack:
            from_ids = start == 0 and not embedded
            return compiled_stack(
                FirstStack if from_ids else Stack,
                vllm_config,
                adapter=self.adapter,
                start=start,
                stop=stop,
                taps=taps if start == first else (),
            )

        self.stacks = [compiled(*span) for span in spans]
        self.whole = compiled(first, last) if whole else None
        self.compiled = [*self.stacks, *([self.whole] if self.whole else [])]
        self.has_residual = self.adapter.has_residual
        # CUDA graphs read their inputs at fixed addresses, so these buffers pass the
        # state from stack to stack.
        self.graph_buffers: CutState | None = None
        # The stacks are compiled, so the decoder around them must not be.
        decoder = self.adapter.decoder
        decoder.do_not_compile = True
        decoder.forward = self.adapter.forward_of(self)

    def allocate_graph_buffers(
        self,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the buffers between stacks for CUDA graphs."""
        hidden = torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device)
        residual = torch.zeros_like(hidden) if self.has_residual else None
        self.graph_buffers = (hidden, residual)

    def in_graph_buffers(self, state: CutState) -> CutState:
        """The state where the next stack expects it: the state itself, or its copy in
        the CUDA graphs' buffers.
        """
        if self.graph_buffers is None:
            return state
        views = tuple(
            None
            if buffer is None or part is None
            else buffer[: part.shape[0]].copy_(part)
            for buffer, part in zip(self.graph_buffers, state, strict=True)
        )
        return views[0], views[1]  # type: ignore[return-value]

    def embeddings(
        self, input_ids: Tensor | None, given: Tensor | None = None
    ) -> Tensor | None:
        """The embeddings from which the first stack starts, [tokens, hidden]; None if
        it embeds token IDs itself.

        Args:
            input_ids: [tokens]; may be None if embeddings are given.
            given: [tokens, hidden] embeddings from the model, including images.
        """
        if not self.embedded:
            return None
        if given is not None:
            return given
        assert input_ids is not None
        return self.adapter.embed(input_ids)

    def start(
        self,
        stack: Stack,
        input_ids: Tensor | None,
        positions: Tensor,
        embeddings: Tensor | None,
    ) -> Any:
        """Run a stack that begins at the model's input."""
        if embeddings is None:
            return stack(input_ids, positions)
        return stack(positions, embeddings, None)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        state: CutState | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Run the whole model.

        Args:
            input_ids: [tokens].
            positions: [tokens].
            state: from the previous pipeline stage; None on the first.
            inputs_embeds: [tokens, hidden] in place of input_ids, for a multimodal
                model.

        Returns:
            Normed hidden states [tokens, hidden], with the sums at the taps after
            them; the state if the target's last layer is in a later stage.
        """
        embeddings = None
        if state is None:
            embeddings = self.embeddings(input_ids, inputs_embeds)
        output: Any = state
        # In vLLM's trial run, which has no attention metadata, the stacks are compiled,
        # too.
        if self.whole is None or get_forward_context().attn_metadata is None:
            for stack in self.stacks:
                if output is None:
                    output = self.start(stack, input_ids, positions, embeddings)
                else:
                    output = stack(positions, *self.in_graph_buffers(output))
        if self.whole is not None:
            output = self.start(self.whole, input_ids, positions, embeddings)
        return output

    def attention_layers(self, level: int, names: Sequence[str]) -> list[str]:
        """The names of vLLM's attention layers in a stack."""
        stack = self.stacks[level]
        numbers = range(stack.start, stack.stop)
        return [name for name in names if extract_layer_index(name) in numbers]
