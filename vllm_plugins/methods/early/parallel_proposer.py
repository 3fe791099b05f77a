# SPDX-License-Identifier: Apache-2.0
"""Early drafting on ParaDecode's own schedule: tokens at different depths in the same batched products (section 2.2).

One engine step for every decoding request:

    verify     vLLM's rejection sampler, from the final hidden states of [b, d1..dn] that the step before left
    schedule   b' and n tokens behind it through all layers, as many in flight as the exits predict

The target itself is not cut: prompts and steps without saved states are vLLM's own forward over the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState, adapter_of
from vllm_ppd.model_patches.stacked_layers import StackedLayers
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.engine.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.engine.v1.step import Step
from vllm_ppd.vllm_plugins.methods.early.parallel_layers import ParallelLayers
from vllm_ppd.vllm_plugins.methods.early.parallel_schedule import ParallelSchedule
from vllm_ppd.vllm_plugins.methods.early.proposer import DeferredKVProposer
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, early_heads


class ParallelProposer(DeferredKVProposer):
    """Drafts at exit layers, completes and verifies the drafts in the same step."""

    def load_model(self, model: Any) -> None:
        config, device = self.config, self.runner.device
        adapter = adapter_of(model, self.vllm_config)
        heads = early_heads(config, device, self.vllm_config.model_config.dtype)
        self.saved = self.allocate_states(has_residual=False)
        self.allocate_probs()
        layers = ParallelLayers(self.runner, StackedLayers(adapter.layers))
        reader = EarlyReader(adapter, TargetLMHead(model), heads)
        self.schedule = ParallelSchedule(config, adapter, layers, reader, self.saved, device)

    def draft_all(self, on: bool) -> None:
        self.schedule.gamma = 0.0 if on else self.config.gamma

    def complete(self, positions: torch.Tensor, state: CutState) -> torch.Tensor:
        """The states are the final ones already."""
        return state[0]

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens, made = self.schedule.run(plan, self.sampling(plan.rows, step.sampling), self.probs)
        self.keep_states(plan, tokens[:, 1:], made)
        self.counters.add("early_predictions", self.schedule.predictions)
        self.counters.add("early_rejections", self.schedule.rejections)
        return tokens[:, 1:], made
