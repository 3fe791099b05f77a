# SPDX-License-Identifier: Apache-2.0
"""Deferred KV: shallow passes between steps keep their states, from which the next step
completes the deeper KV.

States are stored by request row on the device, K + 1 per request: of the newest token
and of each draft. Whether a step uses them depends on the schedule alone, so that all
ranks agree and none waits for a token's value:

    deep    every request decodes and was drafted for: the layers behind the exit alone
    full    vLLM's own forward, which is right for every step: where prompts join, their
            tokens read the weights of the layers before the exit anyway

All states are of one exit, since a step reads its drafts at one.
"""

from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.engine.metrics import Counters


class SavedStates:
    """Preallocated rows of (hidden, residual).

    Args:
        rows: number of states.
        hidden_size, dtype, device: those of the target's hidden states.
        has_residual: whether the family carries a residual stream beside the hidden
            states.
    """

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        has_residual: bool,
    ) -> None:
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.residual = torch.zeros_like(self.hidden) if has_residual else None

    def store(
        self, rows: Tensor, state: CutState, width: int = 1, offset: int = 0
    ) -> None:
        """Copy states [tokens, hidden] in, since vLLM's norms overwrite their inputs.

        Args:
            rows: [tokens] int64, negative ones from the end.
            state: of the tokens.
            width: states of a row.
            offset: which of them is written.
        """
        for store, values in zip(
            (self.hidden, self.residual), state, strict=True
        ):
            if store is not None and values is not None:
                store[offset::width][rows] = values

    def load(self, rows: Tensor) -> CutState:
        """Copies of the states at some rows: [tokens, hidden] each."""
        residual = self.residual
        if residual is not None:
            residual = residual.index_select(0, rows)
        return self.hidden.index_select(0, rows), residual


class DeferredKV:
    """The states of an engine's requests, and their use in steps.

    Args:
        rows: request rows.
        num_drafts: K.
        max_tokens: the most tokens of a step.
        saved: (rows + 1) * (K + 1) states; the last K + 1 are those of padding.
        counters: ours.
    """

    def __init__(
        self,
        rows: int,
        num_drafts: int,
        max_tokens: int,
        saved: SavedStates,
        counters: Counters,
    ) -> None:
        self.width = num_drafts + 1
        self.nobody = rows * self.width  # state index of padding
        self.deep = False  # whether the current step starts from saved states
        self.exit = 0  # index of the exit whose states are saved
        # Request rows whose states the next step may use
        self.drafted = np.zeros(rows, dtype=bool)
        self.saved = saved
        self.counters = counters
        device = saved.hidden.device
        # The state index of each of the step's tokens
        self.state_rows = torch.zeros(
            max_tokens, dtype=torch.int64, device=device
        )

    def begin_step(self, batch: Any) -> None:
        """Determine from the schedule whether all tokens have states.

        Args:
            batch: of the coming step, vLLM's InputBatch.
        """
        rows = batch.idx_mapping_np
        tokens = batch.num_scheduled_tokens
        drafts = batch.num_draft_tokens_per_req
        logits = 1 if drafts is None else drafts + 1
        # Exactly the newest token and the drafts: each has logits.
        known = self.drafted[rows] & ~batch.is_prefilling_np & (tokens == logits)
        self.drafted[rows] = False
        self.deep = bool(known.all())
        self.counters.add("deferred_steps" if self.deep else "fallback_steps")
        if not self.deep:
            return
        starts = np.cumsum(tokens) - tokens
        of_requests = np.repeat(np.arange(len(tokens)), tokens)
        offsets = np.arange(len(of_requests)) - starts[of_requests]
        padded = batch.num_tokens_after_padding
        state_rows = np.full(padded, self.nobody, dtype=np.int64)
        state_rows[: len(offsets)] = rows[of_requests] * self.width + offsets
        async_tensor_h2d(state_rows, out=self.state_rows[:padded])

    def note_drafted(self, rows: ndarray, drafted: ndarray, exit: int) -> None:
        """Note which states the next step may use. Those of another exit expire.

        Args:
            rows: [requests] of the step.
            drafted: [requests] bool, whether their states are valid.
            exit: index of the exit at which the states were saved.
        """
        if exit != self.exit:
            self.exit = exit
            self.drafted[:] = False
        self.drafted[rows] = drafted

    def end_step(self) -> None:
        """End the step; dummy steps, which do not begin, are vLLM's own forward."""
        self.deep = False


class DeferredKVCut(ModelCut):
    """The cut target; its forward starts from the saved states of a step that has them."""

    deferred: DeferredKV | None = None
    passes: Any = None  # ShallowPasses, for the drafter
    exit = 0  # index of the exit at which the step's drafts are read

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, *args: Any
    ) -> Any:
        deferred = self.deferred
        if deferred is None or not deferred.deep:
            return super().forward(input_ids, positions, *args)
        rows = deferred.state_rows[: positions.shape[-1]]
        output: Any = deferred.saved.load(rows)
        for stack in self.stacks[deferred.exit + 1 :]:
            output = stack(positions, *self.in_graph_buffers(output))
        return output

    def shallow(self, input_ids: Tensor, positions: Tensor) -> CutState:
        """Run the layers before the exit, outside of CUDA graphs by pieces.

        Args:
            input_ids, positions: [tokens].

        Returns:
            States, [tokens, hidden].
        """
        embeddings = self.embeddings(input_ids)
        state: CutState = self.start(
            self.stacks[0], input_ids, positions, embeddings
        )
        for stack in self.stacks[1 : self.exit + 1]:
            state = stack(positions, *state)
        return state
