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

from collections.abc import Sequence

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_ppd.model_patches.base import (
    CutState,
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
        buffers: torch.Tensor,
    ) -> None:
        super().__init__(model, vllm_config, (), taps=layers)
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

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
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
        self, model: nn.Module, vllm_config: VllmConfig, embedded: bool = False
    ) -> None:
        last = vllm_config.model_config.hf_text_config.num_hidden_layers - 1
        super().__init__(model, vllm_config, (), embedded=embedded, taps=(last,))
        self.has_residual = False  # the branches read a sum
        self.branches: Stack | None = None
        # [branches, max tokens, hidden], their latest output
        self.branch_hidden: torch.Tensor | None = None

    def add_branches(
        self,
        layers: Sequence[nn.Module],
        vllm_config: VllmConfig,
        hidden: torch.Tensor,
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
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ModelCut.forward; the model is in one pipeline stage."""
        embeddings = self.embeddings(input_ids, inputs_embeds)
        output, before = self.start(
            self.stacks[0], input_ids, positions, embeddings
        )
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
