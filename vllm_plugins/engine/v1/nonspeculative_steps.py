# SPDX-License-Identifier: Apache-2.0
"""Steps in which nobody has a draft, as an engine without speculation prepares them."""

from __future__ import annotations

from typing import Any


class NonSpeculativeSteps:
    """Mixed into GPUModelRunner or CPUModelRunner (V1).

    vLLM computes the metadata of drafts, and runs its rejection sampler, in every step of a speculative engine, as
    models with a recurrent state need. That takes a twentieth of a small model's step, so others are spared it.

    A thinking budget is told that such a step has one row of logits a request.
    """

    speculative_config: Any
    input_batch: Any
    model_config: Any

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        prepare = super()._prepare_inputs  # type: ignore[misc]
        drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        budgets = self.input_batch.thinking_budget_state_holder
        if budgets is not None:
            budgets.in_spec_mode = drafts
        if drafts or self.model_config.has_inner_state:
            return prepare(scheduler_output, *args, **kwargs)
        speculative_config, self.speculative_config = self.speculative_config, None
        try:
            return prepare(scheduler_output, *args, **kwargs)
        finally:
            self.speculative_config = speculative_config
