# SPDX-License-Identifier: Apache-2.0
"""The model runner V2: a mixin over vLLM's own, whose speculator is ours.

Overrides, each of which calls vLLM's:

    __init__          init_speculator, a global of vLLM's module, is ours for that moment
    load_model        verification rejects drafts that are not to be used
    initialize_kv_cache   a speculator may run graphs of its own in place of the target's
    add_requests      options of a request that drafting reads
    sample_tokens     our counters travel with the step's output
    prepare_inputs    what the speculator decides from the schedule, before the target runs
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from vllm.v1.worker.gpu import model_runner

from vllm_ppd.vllm_plugins.config.activation import own_config
from vllm_ppd.vllm_plugins.integration.v2.speculator import Speculator


class DraftingRunnerMixin:
    """Mixed into vLLM's GPUModelRunner or CPUModelRunner (V2)."""

    speculator: Speculator
    rejection_sampler: Any
    req_states: Any
    cudagraph_manager: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        config, stock = own_config(vllm_config, self), model_runner.init_speculator
        assert config.spec.speculator is not None
        model_runner.init_speculator = resolve_name(config.spec.speculator)
        try:
            super().__init__(vllm_config, device)  # type: ignore[call-arg]
        finally:
            model_runner.init_speculator = stock

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.speculator.bind(self)
        self.rejection_sampler = Verification(self.rejection_sampler, self.speculator)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        self.cudagraph_manager.run_fullgraph = self.speculator.graphs_of(self.cudagraph_manager.run_fullgraph)

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            self.speculator.add_request(self.req_states.req_id_to_index[new.req_id], new.sampling_params)
        if scheduler_output.scheduled_new_reqs:
            self.speculator.requests.apply()

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.speculator.begin_step(batch)
        return batch

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if output is not None:
            self.speculator.counters.attach(output.model_runner_output)
        return output


class Verification:
    """vLLM's rejection sampler, which rejects every draft that its request was not to be given."""

    def __init__(self, sampler: Any, speculator: Speculator) -> None:
        self._sampler, self._speculator = sampler, speculator
        self._unprocessed = False  # whether logits were verified as the model gives them

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        unusable = self._speculator.unusable(input_batch)
        if invalid_drafts is not None:
            unusable |= invalid_drafts
        if not self._unprocessed and len(logits) > input_batch.num_reqs:
            self._unprocessed = True
            self._without_processing(logits, input_batch, draft_logits, unusable)
        return self._sampler(logits, input_batch, draft_logits, unusable)

    def _without_processing(self, *args: Any) -> None:
        """Verify as for greedy requests: vLLM's warm-up compiles its kernels for processed logits (float32) alone."""
        needed = self._sampler.sampler.needs_logits_processing
        kept = needed.copy()
        needed[:] = False
        try:
            self._sampler(*args)
        finally:
            needed[:] = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """vLLM's warm-up switches adaptive verification off and on again here."""
        if name in ("_sampler", "_speculator", "_unprocessed"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._sampler, name, value)
