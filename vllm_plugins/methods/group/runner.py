# SPDX-License-Identifier: Apache-2.0
"""The model runner of a worker group's stage, over vLLM's runner V2.

Overrides, each of which calls vLLM's:

    __init__              vLLM's runner decodes plainly: the group's placeholders never
                          reach it
    load_model            cuts the stage
    initialize_kv_cache   room for the candidates' tail blocks
    execute_model         a group step becomes a step of one token per request
    prepare_inputs        the stage learns the order of the batch
    sample                the micro-steps of the last stage
    sample_tokens         the micro-steps of the first stage; counters travel with the
                          output
    reload_weights        the first stage gets the norm and LM head again
                          (engine/runner.py)

The tokens of a group step reach the first stage's tables as those of every step do: by
vLLM's broadcast. vLLM reads it two steps later, as two batches are in flight then.
After a group step none is, so it is read as soon as one of its requests is scheduled.
"""

import copy
import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.runner import UpdatedRunner
from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker, ModelRunner
from vllm_ppd.vllm_plugins.methods.group.first_stage import FirstStage
from vllm_ppd.vllm_plugins.methods.group.last_stage import LastStage
from vllm_ppd.vllm_plugins.platform import PARTITION

logger = init_logger("vllm.vllm_ppd")


class GroupModelRunner(UpdatedRunner, ModelRunner):
    """vLLM's model runner V2 of the platform, on both stages."""

    stage: FirstStage | LastStage

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        super().__init__(plain, *args, **kwargs)
        self.stage = (
            FirstStage(self) if self.is_first_pp_rank else LastStage(self)
        )
        # Of vLLM 0.32 in every step, of 0.33 in the steps that the method names
        self.pp_handler.max_sample_len = self.stage.micro_steps
        self.pp_handler._sample_len = self._sample_len

    def _sample_len(self, batch: Any) -> int:
        """Tokens of a request in the broadcast of a step, the same on both stages."""
        return 1 if self.stage.step is None else self.stage.micro_steps

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        with DeviceMemoryProfiler() as added:
            self.stage.load_model(self.model)
        self.model_memory_usage += added.consumed_memory

    @torch.inference_mode()
    def refresh_copies(self) -> None:
        self.stage.refresh()

    def initialize_kv_cache(
        self, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(self.stage, FirstStage):
            kv_cache_config = copy.deepcopy(kv_cache_config)
            self.stage.candidates.reserve(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    def execute_model(
        self, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scheduler_output = self.stage.begin_step(scheduler_output)
        # vLLM 0.33's first stage would wait for drafts
        scheduler_output.num_spec_tokens_to_schedule = 0
        while self._awaits_tokens(scheduler_output):
            self.update_pp_decode_requests()
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return (
            output if self.stage.step is None else self.stage.end_forward(output)
        )

    def _awaits_tokens(self, scheduler_output: Any) -> bool:
        """Whether a scheduled request's last tokens are among those that vLLM would read later."""
        row_of = self.req_states.req_id_to_index
        rows = [
            row_of.get(name, -1) for name in scheduler_output.num_scheduled_tokens
        ]
        later = itertools.islice(self.pp_handler.queue, 1, None)
        return any(
            received is not None and np.isin(rows, received.idx_mapping_np).any()
            for received in later
        )

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        self.stage.begin_group_step(batch)
        return batch

    def sample(self, hidden_states: Any, batch: Any, grammar: Any) -> Any:
        if grammar is not None:
            # vLLM 0.33 has masks for the placeholders that no such request gets
            masks = grammar.grammar_bitmask
            stride = len(masks) // len(grammar.structured_output_request_ids)
            grammar = dataclasses.replace(
                grammar, grammar_bitmask=masks[::stride]
            )
        output, num_sampled, num_rejected = super().sample(
            hidden_states, batch, grammar
        )
        if self.stage.step is None:
            return output, num_sampled, num_rejected
        assert isinstance(self.stage, LastStage)
        tokens, num_sampled = self.stage.run_micro_steps(
            output.sampled_token_ids[:, 0]
        )
        # vLLM counts a request's scheduled token as computed, less its rejected tokens.
        num_rejected = 1 - num_sampled
        output = dataclasses.replace(
            output,
            sampled_token_ids=tokens,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(self.stage, FirstStage)
            and self.execute_model_state is not None
        ):
            self.stage.run_micro_steps()
        output = super().sample_tokens(*args, **kwargs)
        if isinstance(
            output, AsyncOutput
        ):  # the last stage's, whose counters include the first's
            self.stage.counters.attach(output.model_runner_output)
        return output


class GroupWorker(DraftingWorker):
    """Our worker of the platform as a stage."""

    runner_class = GroupModelRunner

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM reads the layers of a stage from here; the variable is set in the stage's
        # process only.
        os.environ[PARTITION] = required_config(vllm_config, self).partition
        without_full_graphs(vllm_config.compilation_config)
        super().__init__(vllm_config, *args, **kwargs)


def without_full_graphs(compilation: Any) -> None:
    """Replace graphs of the whole model, of which a group runs parts, by those between
    attention calls if vLLM can.
    """
    mode = compilation.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return
    if mode.requires_piecewise_compilation():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info(
            "vllm-ppd: CUDA graphs between attention calls instead of whole-model "
            "graphs (%s)",
            mode,
        )
        return
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    logger.warning(
        "vllm-ppd: CUDA graphs are off: cudagraph_mode %s captures the whole model, but "
        "a worker group runs parts of it; use FULL_AND_PIECEWISE or PIECEWISE",
        mode,
    )
