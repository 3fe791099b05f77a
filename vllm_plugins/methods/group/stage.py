# SPDX-License-Identifier: Apache-2.0
"""The common part of a worker group's stages: recognize a group step, begin it as a
plain one, and exchange messages.

Placeholder drafts of the scheduler mark a group step. vLLM's runner sees a decode step
of one token a request. The stages continue from there, micro-step after micro-step:

    last stage    layers d_bar..d of the current token     -> x, the target's own token
    first stage   layers 0..d-d_bar of k candidates for x, at the same time
    match         the candidate x runs layers d-d_bar..d_bar, its state is sent, the
                  next micro-step begins
    miss          x runs through layers 0..d_bar; the last stage waits (PPD, Algorithm
                  2)

The messages of an engine step go over vLLM's own pipeline group:

    first -> last   a frame: the first stage's counters and which requests continue,
                    and then their states after d_bar
    last -> first   the target's tokens

The receive of tokens is posted before the candidates run, so that the tokens find their
buffer waiting. A send is waited for before the next one. Each tensor-parallel rank
talks to the same rank of the other stage.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, distributed
from vllm.distributed import get_pp_group, get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.cpu.native import unlink_shared_memory
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS, Counters
from vllm_ppd.vllm_plugins.methods.group.passes import StagePasses


class GroupStep(NamedTuple):
    """A step of several micro-steps; each array has an entry per batch row."""

    names: list[str]  # of the requests
    request_rows: ndarray  # of their states and block tables in vLLM's runner
    positions: ndarray  # int64, of the scheduled tokens
    allowance: ndarray  # int64, tokens that each request may emit

    @property
    def size(self) -> int:
        """Requests of the batch."""
        return len(self.names)


class Stage:
    """One stage's side of the group.

    Args:
        runner: vLLM's model runner V2, which drives it.
    """

    cut: ModelCut
    cut_class = ModelCut

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.vllm_config = runner.vllm_config
        self.config = required_config(self.vllm_config, self)
        self.split = self.config.split  # d_bar
        self.micro_steps = self.config.num_speculative_tokens + 1
        self.counters = Counters()
        self.step: GroupStep | None = None  # None in a plain step
        self._allowed: dict[str, int] | None = None

    def take(
        self, model: Any, exits: tuple[int, ...], layers: tuple[int, int]
    ) -> None:
        """Cut the loaded stage, and open the channel to the other one."""
        vllm_config = self.vllm_config
        device = self.runner.device
        hidden_size = vllm_config.model_config.hf_text_config.hidden_size
        dtype = vllm_config.model_config.dtype
        self.cut = self.cut_class(model, vllm_config, exits, layers=layers)
        if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self.cut.allocate_graph_buffers(tokens, hidden_size, dtype, device)
        self.passes = StagePasses(self.runner, self.cut)
        self.channel = StageChannel(hidden_size, dtype, device)

    def begin_step(self, scheduler_output: Any) -> Any:
        """Begin a step: the step for vLLM's runner, of one token per request with placeholders."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.step = None
        self._allowed = None
        if not drafts:
            return scheduler_output
        # A group step has no prompts, so that each request has one token beside its
        # placeholders.
        self._allowed = dict(scheduler_output.num_scheduled_tokens)
        return dataclasses.replace(
            scheduler_output,
            num_scheduled_tokens=dict.fromkeys(self._allowed, 1),
            total_num_scheduled_tokens=len(self._allowed),
            scheduled_spec_decode_tokens={},
        )

    def begin_group_step(self, batch: Any) -> None:
        """Learn the order of a step's batch, vLLM's InputBatch, before the forward."""
        if self._allowed is not None:
            allowance = [self._allowed[name] for name in batch.req_ids]
            self.step = GroupStep(
                batch.req_ids,
                batch.idx_mapping_np,
                batch.num_computed_tokens_np.astype(np.int64),
                np.array(allowance, dtype=np.int64),
            )

    def end_forward(self, output: Any) -> Any:
        """End the forward of a group step's first tokens: the output for the next stage."""
        return output

    def index(self, values: ndarray) -> Tensor:
        """An array of indices on the device."""
        return async_tensor_h2d(values, device=self.runner.device)


class StageChannel:
    """One end of the channel between the stages.

    Args:
        hidden_size, dtype, device: of the states.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        group: Any = get_pp_group()
        self.peer = group.ranks[1 - group.rank_in_group]
        self.host_group = group.cpu_group
        self.device_group = group.device_group
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        # Sends under way, whose tensors must live until they are sent
        self._sends: list[tuple[Any, Tensor]] = []
        self._expected: tuple[Any, Tensor] | None = None
        unlink_shared_memory(group, get_tp_group())

    def send_tokens(self, tokens: ndarray) -> None:
        """Send a token per request of the batch [count] int64."""
        self._send((self.host_group, torch.from_numpy(tokens)))

    def expect_tokens(self, count: int) -> None:
        """Post the receive of a batch's tokens."""
        tokens = torch.empty(count, dtype=torch.int64)
        work = distributed.irecv(tokens, self.peer, group=self.host_group)
        self._expected = work, tokens

    def tokens(self) -> ndarray:
        """Wait for the expected tokens: [count] int64."""
        assert self._expected is not None
        work, tokens = self._expected
        work.wait()
        return tokens.numpy()

    def send_frame(
        self, rows: ndarray, state: CutState | None, count: int, counted: ndarray
    ) -> None:
        """Send states of some rows of a batch.

        Args:
            rows: [rows] to send; an empty array ends the step.
            state: (hidden, residual) [rows, hidden] each; None without rows.
            count: requests of the batch.
            counted: [counters] float64 of our counters, which the last stage reports to
                vLLM.
        """
        continues = np.zeros(count)
        continues[rows] = 1
        frame = torch.from_numpy(np.concatenate([counted, continues]))
        messages = [(self.host_group, frame)]
        if state is not None:
            hidden, residual = state
            assert residual is not None
            messages.append((self.device_group, torch.stack([hidden, residual])))
        self._send(*messages)

    def frame(self, count: int) -> tuple[ndarray, CutState, ndarray]:
        """Wait for a batch's frame: (rows, their states, the first stage's counters)."""
        frame = torch.empty(len(COUNTERS) + count, dtype=torch.float64)
        distributed.recv(frame, self.peer, group=self.host_group)
        counted, continues = np.split(frame.numpy(), [len(COUNTERS)])
        rows = np.flatnonzero(continues)
        shape = 2, len(rows), self.hidden_size
        state = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(rows):
            distributed.recv(state, self.peer, group=self.device_group)
        return rows, (state[0], state[1]), counted

    def _send(self, *messages: tuple[Any, Tensor]) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends = [
            (distributed.isend(tensor, self.peer, group=group), tensor)
            for group, tensor in messages
        ]
