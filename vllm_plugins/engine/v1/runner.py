# SPDX-License-Identifier: Apache-2.0
"""The model runner: a mixin over vLLM's own that hands its hidden states to the proposer.

Overrides, each of which calls vLLM's unless we draft:

    _update_states             a step begins
    _model_forward             part of the target instead of the full forward
    sample_tokens              our counters go with the step's output
    _sample                    tokens that a method adds to the sampled ones
    propose_draft_token_ids    drafting
    take_draft_token_ids       nothing where nobody drafts
    profile_run                drafting takes memory, too, and compiles its kernels

and those of verification.py.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ppd.vllm_plugins.engine.v1.batch import Step, with_counts
from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer
from vllm_ppd.vllm_plugins.engine.v1.verification import Verification


class DraftingRunnerMixin(Verification):
    """Mixed into GPUModelRunner or CPUModelRunner (V1)."""

    drafter: Proposer
    vllm_config: Any
    speculative_config: Any
    requests: dict[str, Any]
    _draft_token_ids: Any  # vLLM's: what propose_draft_token_ids gave

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafter.bind(self)

    def _update_states(self, scheduler_output: Any) -> Any:
        self.drafter.begin_step(scheduler_output)
        # A bypassed step is what it is without speculation, and the drafter is not called after it.
        self.speculative_config = None if self.drafter.bypass.active else self.vllm_config.speculative_config
        return super()._update_states(scheduler_output)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        hidden = None
        if positions is not None:
            hidden = self.drafter.forward(input_ids, positions)
        if hidden is not None:
            return hidden
        return super()._model_forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
        )

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        stock = super()._sample
        return self.drafter.after_sampling(logits, lambda: stock(logits, spec_decode_metadata))

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.drafter.warm_up()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return with_counts(super().sample_tokens(*args, **kwargs), self.drafter.counters)  # type: ignore[misc]

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        step = Step(sampled_token_ids, spec_decode_metadata, sampling_metadata, hidden_states)
        drafts = self.drafter.draft(step)
        self._draft_probs = self._draft_prob_req_ids = None
        q_rows = self.drafter.host.q_rows
        if q_rows is not None and not self.drafter.looked_up and not sampling_metadata.all_greedy:
            self._draft_probs, self._draft_prob_req_ids = q_rows, list(self.drafter.rows.names)
        return drafts

    def take_draft_token_ids(self) -> Any:
        if isinstance(self._draft_token_ids, list) and not any(self._draft_token_ids):
            return None  # the scheduler would look every request up to note that it has none, as it has anyway
        return super().take_draft_token_ids()  # type: ignore[misc]
