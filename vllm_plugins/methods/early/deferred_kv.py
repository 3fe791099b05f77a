# SPDX-License-Identifier: Apache-2.0
"""Deferred KV: shallow passes between steps keep their states, from which the next step
completes the deeper KV.

States are stored by request row on the device, K + 1 per request: of the newest token
and of each draft. Whether a step uses them depends on the schedule alone, so that all
ranks agree and none waits for a token's value:

    deep    every request decodes and was drafted for: the last stack alone
    mixed   some have states, and prompts join: the first stack over the tokens without
            a state, the last one over all
    full    vLLM's own forward
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.engine.metrics import Counters

Mode = Literal["deep", "mixed", "full"]


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

    def store(self, rows: torch.Tensor, state: CutState) -> None:
        """Copy states [tokens, hidden] in, since vLLM's norms overwrite their inputs;
        rows [tokens] int64.
        """
        for store, values in zip((self.hidden, self.residual), state, strict=True):
            if store is not None and values is not None:
                store.index_copy_(0, rows, values)

    def store_token(
        self, rows: torch.Tensor, offset: int, width: int, state: CutState
    ) -> None:
        """Copy a state a request in, of the token so far behind its newest one; `width`
        states are a request's.

        Request rows [tokens] may be -1, which is the last request's.
        """
        for store, values in zip((self.hidden, self.residual), state, strict=True):
            if store is not None and values is not None:
                store.unflatten(0, (-1, width))[rows, offset] = values

    def load(self, rows: torch.Tensor) -> CutState:
        """Copies of the states at some rows: [tokens, hidden] each."""
        residual = (
            None if self.residual is None else self.residual.index_select(0, rows)
        )
        return self.hidden.index_select(0, rows), residual


@dataclass(frozen=True)
class ScheduledStep:
    """A step before it runs, with an entry for each request of the batch."""

    rows: np.ndarray  # [requests] request rows
    tokens: np.ndarray  # [requests] scheduled tokens
    drafts: np.ndarray  # [requests] drafts among them
    prefilling: np.ndarray  # [requests] bool
    padded: int  # tokens of the step, with the padding of CUDA graphs


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
        self.mode: Mode = "full"  # of the current step
        # Request rows whose states the next step may use
        self.drafted = np.zeros(rows, dtype=bool)
        self.saved = saved
        self.counters = counters
        device = saved.hidden.device
        # The state index of each of the step's tokens
        self.state_rows = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # Requests of a mixed step without states
        self._fresh = np.zeros(0, dtype=np.int64)
        # Indices of their tokens in the step
        self._fresh_tokens = torch.zeros(0, dtype=torch.int64, device=device)

    def begin_step(self, step: ScheduledStep, may_mix: bool) -> None:
        """Determine from the schedule which tokens have states.

        Args:
            step: the coming step.
            may_mix: whether the first stack can run over a part of the step's tokens.
        """
        # Exactly the newest token and the drafts: each has logits.
        known = (
            self.drafted[step.rows]
            & ~step.prefilling
            & (step.tokens == step.drafts + 1)
        )
        # While steps are timed, there may be more looked-up drafts
        known &= step.drafts < self.width
        self.drafted[step.rows] = False
        if known.all():
            self.mode = "deep"
        elif known.any() and may_mix:
            self.mode = "mixed"
        else:
            self.mode = "full"
        self.counters.add("fallback_steps" if self.mode == "full" else "deferred_steps")
        if self.mode == "full":
            return
        starts = np.cumsum(step.tokens) - step.tokens
        of_requests = np.repeat(np.arange(len(step.tokens)), step.tokens)
        offsets = np.arange(len(of_requests)) - starts[of_requests]
        state_rows = np.full(step.padded, self.nobody, dtype=np.int64)
        state_rows[: len(offsets)] = step.rows[of_requests] * self.width + offsets
        if self.mode == "mixed":
            self._fresh = np.flatnonzero(~known)
            tokens = np.flatnonzero(~known[of_requests])
            state_rows[tokens] = self.nobody
            self._fresh_tokens = async_tensor_h2d(tokens, device=self.state_rows.device)
        async_tensor_h2d(state_rows, out=self.state_rows[: step.padded])

    def end_step(self) -> None:
        """End the step; dummy steps, which do not begin, are vLLM's own forward."""
        self.mode = "full"

    def states(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, passes: Any
    ) -> CutState:
        """The states of the step's tokens after the first stack: [tokens, hidden] each.

        Args:
            input_ids, positions: [tokens] of the step.
            passes: run the first stack for requests without states (FirstStackPasses).
        """
        state = self.saved.load(self.state_rows[: positions.shape[-1]])
        if self.mode == "mixed":
            assert input_ids is not None
            made = passes.of_requests(
                self._fresh, self._fresh_tokens, input_ids, positions
            )
            for store, values in zip(state, made, strict=True):
                if store is not None and values is not None:
                    store.index_copy_(0, self._fresh_tokens, values)
        return state


class DeferredKVCut(ModelCut):
    """The cut target; its forward starts from the saved states of a step that has them."""

    deferred: DeferredKV | None = None
    passes: Any = None  # FirstStackPasses

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | CutState:
        if self.deferred is None or self.deferred.mode == "full":
            return super().forward(input_ids, positions, state, inputs_embeds)
        return self.complete(
            positions, self.deferred.states(input_ids, positions, self.passes)
        )

    def complete(self, positions: torch.Tensor, state: CutState) -> torch.Tensor:
        """Normed hidden states [tokens, hidden] of tokens from their saved states."""
        hidden: torch.Tensor = self.stacks[-1](positions, *self.in_graph_buffers(state))
        return hidden

    def run(self, offset: int, token_ids: torch.Tensor) -> CutState:
        """FirstStack.run for the staged requests."""
        assert self.deferred is not None
        state: CutState = self.passes.one_token(offset, token_ids)
        self.deferred.saved.store_token(
            self.passes.rows(len(token_ids)), offset, self.deferred.width, state
        )
        return state
