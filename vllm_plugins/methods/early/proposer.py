# SPDX-License-Identifier: Apache-2.0
"""Early drafting on runner V1: passes of the first stack, and steps that use their states."""

from typing import Any

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.engine.v1.batch import Batch, Step
from vllm_ppd.vllm_plugins.engine.v1.passes import Span, StackPasses
from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKV, ScheduledStep


class PlannedPasses:
    """The first stack over the tokens of a plan, and within a step.

    Args:
        batch: of the runner.
        passes: of the target's stacks.
        device: of the target.
    """

    def __init__(self, batch: Batch, passes: StackPasses, device: torch.device) -> None:
        self.batch, self.passes, self.device = batch, passes, device
        self.plan: Plan | None = None  # None while vLLM measures memory

    def one_token(self, offset: int, token_ids: torch.Tensor) -> CutState:
        """Run the requests that may draft so far; the states of the others are zeros."""
        requests, plan = len(token_ids), self.plan
        if plan is None:
            return self.passes.zeros(requests)
        token_ids = token_ids.clamp(min=0)  # INVALID is not a token
        active = np.flatnonzero(plan.max_drafts >= offset)
        span = Span(plan.rows[active], plan.base_positions[active] + offset, np.ones(len(active), dtype=np.int64))
        if len(active) == requests:
            return self.passes.first(span, token_ids)
        index = torch.from_numpy(active).to(self.device, non_blocking=True)
        whole, state = self.passes.zeros(requests), self.passes.first(span, token_ids[index])
        for out, values in zip(whole, state, strict=True):
            if out is not None and values is not None:
                out.index_copy_(0, index, values)
        return whole

    def of_requests(
        self, requests: np.ndarray, index: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> CutState:
        """Run every token of some requests of the current step."""
        lengths = np.diff(self.batch.starts).astype(np.int64)[requests]
        span = Span(requests, self.batch.computed.astype(np.int64)[requests], lengths)
        return self.passes.first(span, input_ids.index_select(0, index), within_step=True)


class DeferredKVProposer(Proposer):
    """Runs the first stack for the drafter, keeps its states, and completes the deferred KV in the next step."""

    drafts_for_all = True  # the next step needs the state of every request's newest token
    may_mix = True  # whether the first stack can run over some of a step's tokens
    deferred: DeferredKV

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        cut = self.host.target.cut
        self.deferred = DeferredKV(self.host, cut.adapter.has_residual)
        # Token IDs do not describe the content of a multimodal prompt.
        self.may_mix = len(cut.stacks) == 2 and not cut.embedded
        self.passes = StackPasses(self.runner, cut)
        self.planned = self.deferred.passes = PlannedPasses(self.batch, self.passes, self.runner.device)
        self.host.shallow = self.deferred.shallow

    def add_request(self, row: int, params: Any) -> None:
        super().add_request(row, params)
        self.deferred.drafted[row] = False

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        batch = self.batch
        names, tokens = batch.req_ids, np.diff(batch.starts).astype(np.int64)
        drafts = np.array([len(self._drafts.get(name, ())) for name in names], dtype=np.int64)
        prefilling = batch.computed < batch.prompt_lengths
        step = ScheduledStep(self.request_rows, tokens, drafts, prefilling, positions.shape[-1])
        self.deferred.begin_step(step, self.may_mix)
        try:
            return self.deferred.forward(input_ids, positions)
        finally:
            self.deferred.end_step()

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens, made = self.make_drafts(plan, step)
        self.deferred.drafted[self.request_rows[plan.rows]] = True
        return tokens, made

    @property
    def gamma(self) -> float:
        """The confidence that a draft must exceed; timed steps make every draft."""
        return self.config.gamma if self.planner.forced is None else 0.0

    def make_drafts(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Draft for the requests of a plan: (tokens [requests, K], usable drafts [requests])."""
        self.planned.plan = plan
        return super().draft_plan(plan, step)
