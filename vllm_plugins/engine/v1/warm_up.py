# SPDX-License-Identifier: Apache-2.0
"""After vLLM's own warm-up on runner V1: the number of drafts follows step costs."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.measure import counts_of
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import KINDS, PRIOR_WEIGHT
from vllm_ppd.vllm_plugins.engine.dummy_batch import most_requests
from vllm_ppd.vllm_plugins.engine.step_costs import costs_of_engine
from vllm_ppd.vllm_plugins.engine.v1.dummy_steps import STEPS, time_steps
from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer


class WarmUpMixin:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        times, drafter = super().compile_or_warm_up_model(), self.model_runner.drafter  # type: ignore[misc]
        if drafter.config.adaptive:
            set_draft_length(drafter)
        return times


def set_draft_length(drafter: Proposer) -> None:
    """Have the number of drafts follow what pays from here on."""
    config, planner, lookup = drafter.config, drafter.planner, drafter.config.most_lookup_drafts
    # Steps with the method's drafts, and with looked-up ones where there are any.
    counts = [counts_of(config.num_speculative_tokens), *([counts_of(lookup)] if lookup else [])]
    steps = [(numbers, functools.partial(time_steps, drafter, bool(i))) for i, numbers in enumerate(counts)]
    largest = min(most_requests(drafter.runner, numbers, STEPS) for numbers in counts)
    costs = costs_of_engine(config, drafter.vllm_config, drafter.counters, largest, steps)
    if costs is None:
        return
    planner.controller = DraftLengthController(StepCosts(costs.method))
    if planner.sources is not None:
        assert costs.lookup is not None
        planner.sources.method = planner.controller
        planner.sources.lookup = DraftLengthController(StepCosts(costs.lookup), KINDS, PRIOR_WEIGHT)
