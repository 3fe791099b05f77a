# SPDX-License-Identifier: Apache-2.0
"""Early drafting with ParaDecode's own schedule: tokens at different depths share batched products (section 2.2).

One engine step for every decoding request:

    verify     vLLM's rejection sampler, from the final hidden states of [b, d1..dn] that the step before left
    schedule   b' and n tokens after it run through all layers, as many in flight as the exits predict

The target itself is not cut: prompts and steps without saved states are vLLM's own forward over the same weights.
"""

from typing import Any

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState, adapter_of
from vllm_ppd.model_patches.stacked_layers import StackedLayers
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.engine.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.engine.v1.batch import Step
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKV
from vllm_ppd.vllm_plugins.methods.early.parallel_layers import ParallelLayers
from vllm_ppd.vllm_plugins.methods.early.parallel_schedule import ParallelSchedule
from vllm_ppd.vllm_plugins.methods.early.proposer import DeferredKVProposer
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, early_heads


class FinalStates(DeferredKV):
    """The final hidden states of drafts that ran through every layer."""

    def complete(self, positions: torch.Tensor, state: CutState) -> torch.Tensor:
        return state[0]


class ParallelProposer(DeferredKVProposer):
    """Drafts at exit layers, then completes and verifies the drafts in the same step."""

    may_mix = False  # the target is not cut

    def load_model(self, model: Any) -> None:
        config, device = self.config, self.runner.device
        adapter = adapter_of(model, self.vllm_config)
        heads = early_heads(config, device, self.vllm_config.model_config.dtype)
        self.allocate_q()
        self.deferred = FinalStates(self.host, has_residual=False)
        layers = ParallelLayers(self.runner, StackedLayers(adapter.layers))
        reader = EarlyReader(adapter, TargetLMHead(model), heads)
        self.schedule = ParallelSchedule(config, adapter, layers, reader, self.deferred, device)

    def refresh(self) -> None:
        """Nothing to refresh: the layers' storage is the target's own."""

    def warm_up(self) -> None:
        """Nothing to warm up, since no drafter runs separately."""

    def make_drafts(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        request_rows = self.request_rows[plan.rows]
        self.schedule.gamma = self.gamma
        tokens, made = self.schedule.run(plan, request_rows, self.draft_sampling(plan), self.q_rows)
        self.counters.add("early_predictions", self.schedule.predictions)
        self.counters.add("early_rejections", self.schedule.rejections)
        return tokens[:, 1:], self.host.valid(tokens[:, 1:], made)
