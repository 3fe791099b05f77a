# SPDX-License-Identifier: Apache-2.0
"""What the two stages tell each other within an engine step, over vLLM's own pipeline group.

Small integers go over the group's CPU channel, states over its device channel. Each tensor-parallel rank talks to the
rank of its own number in the other stage. Every wait has vLLM's own bound for a step: a stage whose peer died ends.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from vllm import envs
from vllm.distributed import get_pp_group

from vllm_ppd.model_patches.base import CutState


class Wire:
    """One end of the line between the stages. seconds_waited grows by the time spent in receive_numbers."""

    def __init__(self, device: torch.device) -> None:
        self.group: Any = get_pp_group()
        self.peer = self.group.ranks[1 - self.group.rank_in_group]
        self.device = device
        self.bound = timedelta(seconds=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        self.seconds_waited = 0.0

    def send_numbers(self, numbers: np.ndarray) -> None:
        """Send int64 numbers, whose count the peer knows."""
        tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        self._wait(distributed.isend(tensor, self.peer, group=self.group.cpu_group))

    def receive_numbers(self, count: int) -> np.ndarray:
        """[count] int64."""
        tensor = torch.empty(count, dtype=torch.int64)
        started = time.perf_counter()
        self._wait(distributed.irecv(tensor, self.peer, group=self.group.cpu_group))
        self.seconds_waited += time.perf_counter() - started
        return tensor.numpy()

    def send_state(self, state: CutState) -> None:
        """Send (hidden, residual), [rows, hidden] each."""
        for part in state:
            if part is not None:
                self._send(part.contiguous())

    def receive_state(self, rows: int, hidden_size: int, dtype: torch.dtype) -> CutState:
        """(hidden, residual), [rows, hidden] each."""
        hidden = torch.empty(rows, hidden_size, dtype=dtype, device=self.device)
        residual = torch.empty_like(hidden)
        self._receive(hidden)
        self._receive(residual)
        return hidden, residual

    def send_weights(self, tensors: list[torch.Tensor]) -> None:
        """Send tensors of any shape and type."""
        self.group.send_object([(tuple(t.shape), t.dtype) for t in tensors], 1 - self.group.rank_in_group)
        for tensor in tensors:
            self._send(tensor.contiguous())

    def receive_weights(self) -> list[torch.Tensor]:
        """What send_weights sent."""
        shapes = self.group.recv_object(1 - self.group.rank_in_group)
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        for tensor in tensors:
            self._receive(tensor)
        return tensors

    def _send(self, tensor: torch.Tensor) -> None:
        self._wait(distributed.isend(tensor, self.peer, group=self.group.device_group))

    def _receive(self, tensor: torch.Tensor) -> None:
        self._wait(distributed.irecv(tensor, self.peer, group=self.group.device_group))

    def _wait(self, work: distributed.Work | None) -> None:
        assert work is not None  # this rank is in the group
        work.wait(self.bound)
