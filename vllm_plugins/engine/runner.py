# SPDX-License-Identifier: Apache-2.0
"""Our model runner V2: a mixin over vLLM's own with our speculator.

Overrides, each of which calls vLLM's:

    __init__          init_speculator and RequestState, globals of vLLM's module, are
                      ours for that moment
    load_model        RejectionSampler, a global of vLLM's module, is ours for that
                      moment
    add_requests      reads a request's options for drafting; nothing is done in a step
                      that adds none
    execute_model     reads the step's exit, and ends the speculator's step, also after an
                      exception
    sample            states and tokens of answers are kept while heads are learned
    sample_tokens     our counters travel with the step's output; a step without drafts
                      is vLLM's own; learning follows the step's orders
    take_draft_token_ids  none after such a step
    prepare_inputs    begins the speculator's step from the schedule, before the target
                      runs
    reload_weights    copies what drafting has copied of the weights again
"""

import functools
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu import model_runner

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.draft_length.costs import NO_DRAFTS
from vllm_ppd.vllm_plugins.draft_length.learning import LEARNED
from vllm_ppd.vllm_plugins.draft_length.policy import STEP, Step
from vllm_ppd.vllm_plugins.engine.metrics import MATCHED
from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.engine.verification import Verification

# A step that our scheduler did not choose for, such as one of vLLM's warm-up
OTHER = Step(0, 0, None, NO_DRAFTS)


class UpdatedRunner:
    """Mixed into vLLM's model runners, which then have refresh_copies: copy again what
    drafting copied of the target's weights, in place, after these have changed.

    vLLM changes weights in two ways: its runner reloads a checkpoint, or a trainer sends
    them to its worker (engine/worker.py).
    """

    refresh_copies: Callable[[], None]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self.refresh_copies()


class DraftingRunnerMixin(UpdatedRunner):
    """Mixed into vLLM's GPUModelRunner or CPUModelRunner (V2)."""

    speculator: Speculator
    req_states: Any
    sampler: Any  # None except on the last pipeline stage
    execute_model_state: Any
    num_speculative_steps: int
    _step = OTHER  # the latest one
    _drafted = True  # whether it made drafts
    # [requests + 1] where the rows of logits of each request end, of the step that is
    # being prepared
    _logits_ends: np.ndarray | None = None
    # Whether logits processors of a user take part in each step
    _custom_processors = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        config = required_config(vllm_config, self)
        stock = model_runner.RequestState
        # vLLM sets this for its own lookups, too
        dense = {"use_dense_all_token_ids": bool(config.prompt_lookup_min)}
        with temporarily(
            model_runner,
            init_speculator=resolve_name(config.spec.speculator),
            RequestState=lambda **kwargs: stock(**kwargs | dense),
        ):
            super().__init__(vllm_config, device)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with temporarily(
            model_runner,
            RejectionSampler=functools.partial(Verification, self.speculator),
        ):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.speculator.runner = self
        processors = getattr(self.sampler, "logits_processors", ())
        self._custom_processors = not all(
            type(processor).__module__.startswith("vllm.")
            for processor in processors
        )

    @torch.inference_mode()
    def refresh_copies(self) -> None:
        self.speculator.refresh()

    def add_requests(self, scheduler_output: Any) -> None:
        if not (scheduler_output.scheduled_new_reqs or self._custom_processors):
            # vLLM copies all requests' sampling parameters in each step. They change
            # only when a request is added.
            return
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            self.speculator.add_request(
                self.req_states.req_id_to_index[new.req_id], new
            )

    def prepare_inputs(
        self, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.speculator.begin_step(batch)
        self._logits_ends = batch.cu_num_logits_np
        return batch

    def _set_active_loras(
        self, prompt_lora_mapping: Sequence[int], *args: Any, **kwargs: Any
    ) -> None:
        """Set the adapter of each row of logits. vLLM sets one a request, but a request
        has a row for each draft.
        """
        if self._logits_ends is not None:  # not a dummy step
            counts = np.diff(self._logits_ends)
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, counts))
            self._logits_ends = None
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)  # type: ignore[misc]

    def execute_model(
        self, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._step = getattr(scheduler_output, STEP, OTHER)
        self.speculator.read_at(self._step.drafted.exit)
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.speculator.end_step()

    def sample(self, hidden: Any, batch: Any, *args: Any) -> Any:
        result = super().sample(hidden, batch, *args)  # type: ignore[misc]
        if self._step.orders is not None:
            self.speculator.record(batch, hidden, *result[1:])
        return result

    @torch.inference_mode()
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        self._drafted = state is None or state.num_spec_tokens_to_schedule > 0
        proposes = self._drafted
        # Lookups cost next to nothing, and their matches tell when drafts pay.
        lookup = self.speculator.lookup
        alone = lookup is not None and lookup.alone
        if alone and self._step.useful and not proposes:
            proposes = True
            self.execute_model_state = state._replace(
                num_spec_tokens_to_schedule=self.num_speculative_steps
            )
        if proposes:
            output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        else:
            output = self._sample_without_drafting(*args, **kwargs)
        if output is not None:
            self.speculator.take_counts()
            self.speculator.counters.attach(output.model_runner_output)
            if proposes and lookup is not None:
                rows = state.input_batch.idx_mapping_np
                taken = lookup.taken(rows)
                setattr(output.model_runner_output, MATCHED, taken)
            report = self.speculator.follow(self._step.orders)
            if report is not None:
                setattr(output.model_runner_output, LEARNED, report)
        return output

    def _sample_without_drafting(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's sample_tokens as without speculation, except that pending drafts are verified."""
        speculator = self.speculator
        stock = self.sample

        def sample(*arguments: Any) -> Any:
            with temporarily(self, speculator=speculator):
                return stock(*arguments)

        with temporarily(
            self, speculator=None, num_speculative_steps=0, sample=sample
        ):
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]

    def take_draft_token_ids(self) -> Any:
        return super().take_draft_token_ids() if self._drafted else None  # type: ignore[misc]
