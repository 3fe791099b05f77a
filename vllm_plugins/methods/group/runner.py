# SPDX-License-Identifier: Apache-2.0
"""The model runner of a worker group's stage: a mixin over vLLM's own.

Overrides, each of which calls vLLM's:

    execute_model              a group step becomes a step of one token per request
    _model_forward             the first stage has that token's state already if the step before ran ahead
    sample_tokens, _sample     the micro-steps that follow, on either stage
    initialize_kv_cache        room for the candidates' tail blocks
    profile_run                candidates also take memory and compile their kernels
    propose_draft_token_ids    nothing, since the group's tokens are final

and those of engine/v1/verification.py and engine/weight_updates.py.
"""

import copy
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors

from vllm_ppd.vllm_plugins.engine.v1.batch import with_counts
from vllm_ppd.vllm_plugins.engine.v1.verification import Verification
from vllm_ppd.vllm_plugins.engine.weight_updates import UpdatedRunner
from vllm_ppd.vllm_plugins.methods.group.first_stage import FirstStage
from vllm_ppd.vllm_plugins.methods.group.last_stage import LastStage


class GroupRunnerMixin(UpdatedRunner, Verification):
    """Mixed into GPUModelRunner or CPUModelRunner (V1), on both stages."""

    drafter: FirstStage | LastStage
    intermediate_tensors: IntermediateTensors | None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        if get_pp_group().is_first_rank:  # vLLM has started it on the last rank
            self.drafter = FirstStage(vllm_config)
        self.drafter.bind(self)
        self._first_states: IntermediateTensors | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if not get_pp_group().is_first_rank and self.intermediate_tensors is None:
            # vLLM makes these in its profiling run, which it omits on an eager CPU.
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(  # type: ignore[attr-defined]
                batch_size=self.max_num_tokens,  # type: ignore[attr-defined]
                dtype=self.model_config.dtype,
                device=self.device,
            )

    @torch.inference_mode()
    def refresh_copies(self) -> None:
        self.drafter.refresh()

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.drafter, FirstStage):
            kv_cache_config = copy.deepcopy(kv_cache_config)
            self.drafter.candidates.reserve(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        if isinstance(self.drafter, FirstStage):
            self.drafter.candidates.warm_up()

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        if isinstance(self.drafter, FirstStage):  # in a group step, the last stage only runs what vLLM runs
            self.drafter.draft_for_dummies()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._first_states = None
        scheduler_output = self.drafter.begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.drafter
        if not isinstance(stage, FirstStage) or not stage.is_group_step():
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        carried = stage.carried()
        if carried is None:
            self._first_states = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
            if stage.cut.graph_buffers is not None:
                # The micro-steps replay CUDA graphs into the same memory, while vLLM may still be sending from it.
                copies = {name: states.clone() for name, states in self._first_states.tensors.items()}
                self._first_states = IntermediateTensors(copies)
        else:
            self._first_states = IntermediateTensors(dict(zip(("hidden_states", "residual"), carried, strict=True)))
        return self._first_states

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, FirstStage) and self._first_states is not None:
            count = self.input_batch.num_reqs
            states, self._first_states = self._first_states, None
            self.drafter.run_micro_steps((states["hidden_states"][:count], states["residual"][:count]))
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        # The last stage's counters include the first one's; only its output reaches the scheduler.
        return with_counts(output, self.drafter.counters) if isinstance(self.drafter, LastStage) else output

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)
        if isinstance(self.drafter, LastStage) and self.drafter.is_group_step():
            return self.drafter.run_micro_steps(output)
        return output

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in range(self.input_batch.num_reqs)]

    def take_draft_token_ids(self) -> None:
        return None
