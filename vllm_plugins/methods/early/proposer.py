# SPDX-License-Identifier: Apache-2.0
"""Early drafting on the V1 runner: the shallow passes between steps, and the deep pass that completes their KV.

A step whose every scheduled token has a state from the shallow passes runs the target's last stack alone. Any other
step (a prompt joined, a request came back from preemption) runs the full forward, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.engine.v1.passes import StackPasses
from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer
from vllm_ppd.vllm_plugins.engine.v1.span_attention import Span
from vllm_ppd.vllm_plugins.engine.v1.step import Step
from vllm_ppd.vllm_plugins.methods.early.saved_states import SavedStates


class DeferredKVProposer(Proposer):
    """Runs the first stack for the drafter, keeps its states, and completes the deferred KV in the next step."""

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        self.passes = StackPasses(self.runner, self.target.cut, self.padding)
        self.saved = self.allocate_states(self.target.cut.adapter.has_residual)

    def allocate_states(self, has_residual: bool) -> SavedStates:
        """Rows for the base token and every draft of as many requests as a batch holds."""
        scheduler, model_config = self.vllm_config.scheduler_config, self.vllm_config.model_config
        return SavedStates(
            scheduler.max_num_seqs,
            self.config.num_speculative_tokens + 1,
            model_config.hf_text_config.hidden_size,
            model_config.dtype,
            self.runner.device,
            has_residual,
        )

    def begin_step(self, scheduler_output: Any) -> bool:
        """A resumed request's KV blocks are not those of its states, and a new one may bear an old name."""
        changed = super().begin_step(scheduler_output)
        if changed:
            self.saved.clear()
        return changed

    def forward(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The deep pass of a step whose every scheduled token has a saved state.

        Args:
            positions: [tokens] of the step, graph padding included.

        Returns:
            Normed hidden states [tokens, hidden], or None if the step needs the full forward.
        """
        if self.saved.req_ids is None:  # nothing was drafted
            self.counters.add("fallback_steps")
            return None
        batch = self.batch
        query_lens = np.diff(batch.starts).astype(np.int64)
        num_tokens = int(query_lens.sum())
        first_positions = batch.computed.astype(np.int64)
        rows = self.saved.match(batch.req_ids, first_positions, query_lens, batch.input_ids[:num_tokens])
        self.saved.clear()  # a state is good for one step
        if rows is None:
            self.counters.add("fallback_steps")
            return None
        self.counters.add("deferred_steps")
        rows = np.pad(rows, (0, positions.shape[0] - num_tokens))  # the output of padding is not read
        return self.complete(positions, self.saved.load(rows))

    def complete(self, positions: torch.Tensor, state: CutState) -> torch.Tensor:
        """Normed hidden states [tokens, hidden] of tokens from their saved states."""
        cut = self.target.cut
        return cut.stacks[-1](positions, *cut.in_graph_buffers(state))

    def draft(self, step: Step) -> list[list[int]]:
        self.saved.clear()
        return super().draft(step)

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        # The base token's state is of use to requests without drafts, too: the next step needs that of all.
        tokens, made = self.propose_drafts(plan, np.arange(len(plan.rows)), step, self._shallow(plan))
        self.keep_states(plan, tokens, made)
        self.counters.add("confidence_stops", int((made < plan.max_drafts).sum()))
        return tokens, made

    def keep_states(self, plan: Plan, drafts: np.ndarray, made: np.ndarray) -> None:
        """Declare the states of a plan's base tokens and of the drafts made good for the next step."""
        tokens = np.zeros((len(plan.rows), self.saved.width), dtype=np.int64)
        tokens[:, 0], tokens[:, 1 : drafts.shape[1] + 1] = plan.base_tokens, drafts
        self.saved.keep(self.batch.req_ids, plan.rows, plan.base_positions, tokens, made + 1)

    def dummy_shallow(self, offset: int, token_ids: torch.Tensor) -> CutState:
        """DraftInputs.run_shallow without a pass, which has kernels of vLLM's alone: states go to the rows and back."""
        width, rows = self.saved.width, np.arange(len(token_ids), dtype=np.int64)
        states = self.saved.load(rows * width + offset)
        self.saved.store(rows * width + offset, 1, *states)
        return states

    def _shallow(self, plan: Plan) -> Callable[[int, torch.Tensor], CutState]:
        """DraftInputs.run_shallow for the requests of a plan."""

        def run(offset: int, token_ids: torch.Tensor) -> CutState:
            active = np.flatnonzero(plan.max_drafts >= offset)
            rows, every = plan.rows[active], len(active) == len(plan.rows)
            span = Span(rows, plan.base_positions[active] + offset, np.ones(len(active), dtype=np.int64))
            index = self.index(active)
            state = self.passes.first(span, token_ids if every else token_ids[index])
            self.saved.store(rows * self.saved.width + offset, 1, *state)
            if every:
                return state
            whole = (None if part is None else part.new_zeros(len(plan.rows), part.shape[1]) for part in state)
            hidden, residual = (
                None if part is None or out is None else out.index_copy_(0, index, part)
                for part, out in zip(state, whole, strict=True)
            )
            assert hidden is not None
            return hidden, residual

        return run
