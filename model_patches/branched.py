# SPDX-License-Identifier: Apache-2.0
"""A model with branches: further layers that read the pre-final hidden state, the last
layer's input (DynaMo).

    token ids -> [embed, layers ..L-1] -> pre-final state -> [layer L, norm] -> hidden
                                                          -> [branch: a token head's
                                                          layer, norm] -> hidden

The target stays in one piece, so a forward without the branches takes as long as vLLM's
own. Heads that read the states of several layers need no branch: the forward stores
these states (TappedModel).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_ppd.model_patches.base import (
    CutState,
    FirstStack,
    ModelCut,
    Stack,
    compiled_stack,
    summed,
)


def tapped(
    stack: Stack,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Normed hidden states, and the sums that the layers at the stack's taps read,
    [tokens, hidden] each.
    """
    state: CutState = (hidden, residual)
    states = []
    for start, stop in itertools.pairwise([0, *stack.taps, len(stack.layers)]):
        state = stack.adapter.run(stack.layers[start:stop], positions, *state)
        if stop < len(stack.layers):
            states.append(summed(state))  # vLLM's norms overwrite what they are given
    return stack.adapter.norm(*state), *states


class TappedStack(FirstStack):
    """A stack of the whole target that also returns the states before some of its layers."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        return tapped(self, positions, self.adapter.embed(input_ids), None)


class TappedEmbeddedStack(Stack):
    """A TappedStack that starts from embeddings."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Any:
        return tapped(self, positions, hidden, residual)


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

    first_stack = TappedStack

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        layers: Sequence[int],
        buffers: torch.Tensor,
    ) -> None:
        super().__init__(model, vllm_config, ())
        self.stacks[0].taps = tuple(layers)
        self.buffers = buffers

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ModelCut.forward; the model is in one pipeline stage."""
        output, *states = self.start(self.stacks[0], input_ids, positions, None)
        for buffer, state_after in zip(self.buffers, states, strict=True):
            buffer[: len(state_after)].copy_(state_after)
        return output


class Branches(Stack):
    """Further layers that read the same state, compiled as one piece, since starting a
    piece costs host time.
    """

    def forward(  # type: ignore[override]
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return each layer's normed hidden states [tokens, hidden], given the
        pre-final state without a residual.
        """
        return tuple(
            self.adapter.norm(
                *self.adapter.run([layer], positions, hidden.clone(), None)
            )
            for layer in self.layers
        )


class BranchedModel(ModelCut):
    """A loaded model whose forward runs further layers beside its last one, unless they
    are skipped.

    Args:
        model: the causal LM as vLLM loaded it.
        vllm_config: vLLM's configuration; its compilation mode also applies to the
            branches.
        embedded: whether forwards are given embeddings in place of token IDs.
    """

    first_stack = TappedStack
    first_stack_embedded = TappedEmbeddedStack

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, embedded: bool = False
    ) -> None:
        super().__init__(model, vllm_config, (), embedded=embedded)
        self.stacks[0].taps = (len(self.adapter.layers) - 1,)
        self.branches: Stack | None = None
        # [branches, max tokens, hidden], their latest output
        self.branch_hidden: torch.Tensor | None = None
        self.skip_branches = False  # whether forwards leave out the branches

    def add_branches(
        self, layers: Sequence[nn.Module], vllm_config: VllmConfig, hidden: torch.Tensor
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
        self.branch_hidden = hidden

    @property
    def compiled(self) -> list[Stack]:
        return [*super().compiled, *([] if self.branches is None else [self.branches])]

    def allocate_graph_buffers(
        self,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.graph_buffers = (
            torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device),
            None,
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ModelCut.forward; the model is in one pipeline stage."""
        embeddings = self.embeddings(input_ids, inputs_embeds)
        output, before = self.start(self.stacks[0], input_ids, positions, embeddings)
        if (
            self.branches is not None
            and self.branch_hidden is not None
            and not self.skip_branches
        ):
            if self.graph_buffers is not None:
                # The branches' CUDA graphs may reuse the memory of the target's last
                # graph
                output = output.clone()
            states = self.branches(positions, *self.in_graph_buffers((before, None)))
            for hidden, state in zip(self.branch_hidden, states, strict=True):
                hidden[: output.shape[0]].copy_(state)
        return output
