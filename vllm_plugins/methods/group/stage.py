# SPDX-License-Identifier: Apache-2.0
"""The common part of a worker group's stages: recognise a group step, and run it as a step of one token and more.

Placeholder drafts of the scheduler mark a group step. The runner then sees a plain decode step of one token a request,
which vLLM prepares, runs and samples as usual; the stages continue from there, micro-step after micro-step:

    last stage    layers d_bar..d of the current token     -> x, the target's own token
    first stage   layers 0..d-d_bar of k candidates for x, at the same time
    match         the candidate x runs layers d-d_bar..d_bar, its state is sent, the next micro-step begins
    miss          x runs through layers 0..d_bar; the last stage waits   (PPD, Algorithm 2)
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import ModelCut
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.v1.batch import Batch
from vllm_ppd.vllm_plugins.engine.v1.passes import StackPasses
from vllm_ppd.vllm_plugins.methods.group.scheduler import PLACEHOLDER
from vllm_ppd.vllm_plugins.methods.group.stage_channel import StageChannel


class Stage(ABC):
    """One stage's side of the group; vLLM builds it, the runner drives it."""

    def __init__(self, vllm_config: Any) -> None:
        config = required_config(vllm_config, self)
        self.vllm_config = vllm_config
        self.config = config
        self.split = config.split  # d_bar
        self.micro_steps = config.num_speculative_tokens + 1
        self.allowance: np.ndarray | None = None  # [batch rows] tokens each may emit in this group step
        self._allowed: dict[str, int] | None = None

    def bind(self, runner: Any) -> None:
        """Take the model runner that will drive this stage."""
        self.runner = runner
        self.batch = Batch(runner)
        self.counters = Counters()

    def take(self, model: Any, exits: tuple[int, ...], layers: tuple[int, int]) -> None:
        """Cut the loaded stage, and open the channel to the other one; the process groups must exist."""
        vllm_config, device = self.vllm_config, self.runner.device
        hidden_size, dtype = vllm_config.model_config.hf_text_config.hidden_size, vllm_config.model_config.dtype
        self.cut = ModelCut(model, vllm_config, exits, layers=layers)
        if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self.cut.allocate_graph_buffers(tokens, hidden_size, dtype, device)
        self.passes = StackPasses(self.runner, self.cut)
        self.channel = StageChannel(hidden_size, dtype, device)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's interface for drafts; a group makes none."""
        raise RuntimeError("a worker group needs vllm-ppd's worker; remove --worker-cls")

    @abstractmethod
    def load_model(self, model: Any) -> None:
        """Take the loaded stage and allocate everything, before vLLM measures the memory left for its KV cache."""

    @abstractmethod
    def refresh(self) -> None:
        """Exchange the copies of the target's weights again, on both stages, after these have changed."""

    def begin_step(self, scheduler_output: Any) -> Any:
        """Begin a step; returns the step for the runner, with one token per request if it has placeholders."""
        placeholders = scheduler_output.scheduled_spec_decode_tokens
        self._allowed = None
        self.allowance = None
        if not placeholders:
            return scheduler_output
        plain = _without_drafts(scheduler_output)
        scheduled = plain.num_scheduled_tokens
        # With a prompt in the batch, or drafts not from our scheduler, the step is an ordinary vLLM step.
        ours = all(token == PLACEHOLDER for tokens in placeholders.values() for token in tokens)
        small = len(scheduled) <= (self.config.disable_by_batch_size or 1)
        if ours and small and all(count == 1 for count in scheduled.values()):
            self._allowed = {req_id: 1 + len(placeholders.get(req_id, ())) for req_id in scheduled}
        return plain

    def is_group_step(self) -> bool:
        """Whether this step has several micro-steps; the batch's rows must be up to date."""
        if self._allowed is not None and self.allowance is None:
            self.allowance = np.array([self._allowed[name] for name in self.batch.req_ids], dtype=np.int64)
        return self.allowance is not None

    def base_positions(self) -> np.ndarray:
        """[batch rows] position of the step's scheduled token."""
        return self.batch.computed.astype(np.int64)

    def index(self, values: np.ndarray) -> torch.Tensor:
        """An array of indices on the device."""
        return async_tensor_h2d(values, device=self.runner.device)


def _without_drafts(scheduler_output: Any) -> Any:
    """A copy of a step of vLLM's scheduler without its drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = {
        name: count - len(drafts.get(name, ())) for name, count in scheduler_output.num_scheduled_tokens.items()
    }
    return dataclasses.replace(
        scheduler_output,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
    )
