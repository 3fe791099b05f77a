# SPDX-License-Identifier: Apache-2.0
"""Messages between the two stages within an engine step, over vLLM's own pipeline
group.

    first -> last   a frame: the first stage's counters and which requests continue,
                    and then their states after d_bar
    last -> first   the target's tokens

The receive of tokens is posted before the candidates run, so that the tokens find their
buffer waiting. A send is waited for before the next one. Each tensor-parallel rank
talks to the same rank of the other stage.
"""

from typing import Any

import numpy as np
import torch
from torch import distributed
from vllm.distributed import get_pp_group, get_tp_group

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.cpu.native import unlink_shared_memory
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS


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
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._expected: tuple[Any, torch.Tensor] | None = None
        unlink_shared_memory(group, get_tp_group())

    def send_tokens(self, tokens: np.ndarray) -> None:
        """Send a token per request of the batch [count] int64."""
        self._send((self.host_group, torch.from_numpy(tokens)))

    def expect_tokens(self, count: int) -> None:
        """Post the receive of a batch's tokens."""
        tokens = torch.empty(count, dtype=torch.int64)
        work = distributed.irecv(tokens, self.peer, group=self.host_group)
        self._expected = work, tokens

    def tokens(self) -> np.ndarray:
        """Wait for the expected tokens: [count] int64."""
        assert self._expected is not None
        work, tokens = self._expected
        work.wait()
        return tokens.numpy()

    def send_frame(
        self,
        rows: np.ndarray,
        state: CutState | None,
        count: int,
        counted: np.ndarray,
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

    def frame(self, count: int) -> tuple[np.ndarray, CutState, np.ndarray]:
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

    def _send(self, *messages: tuple[Any, torch.Tensor]) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends = [
            (distributed.isend(tensor, self.peer, group=group), tensor)
            for group, tensor in messages
        ]
