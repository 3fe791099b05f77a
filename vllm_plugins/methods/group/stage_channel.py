# SPDX-License-Identifier: Apache-2.0
"""Messages between the two stages within an engine step, over vLLM's own pipeline
group.

    first -> last   a frame: the first stage's counters, which requests continue, and
                    their states after d_bar
    last -> first   the target's tokens

Receives are posted before the work that computes the answer, so that a message finds
its buffer waiting; sends are not waited for until the next one. Each tensor-parallel
rank talks to the same rank of the other stage. Every wait of the host has vLLM's time
limit for a step, so a stage whose peer died ends.
"""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from vllm import envs
from vllm.distributed import get_pp_group, get_tp_group

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.cpu.workarounds import unlink_shared_memory
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS

_NUMBER = 8  # bytes
_COUNTED = len(COUNTERS) * _NUMBER


class StageChannel:
    """One end of the channel between the stages.

    Args:
        hidden_size, dtype: of the states.
        device: of the states. On a CPU they travel in the frame, else over the group's
            device channel after it.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group: Any = get_pp_group()
        self.peer = self.group.ranks[1 - self.group.rank_in_group]
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.inline = device.type == "cpu"
        self.bound = timedelta(seconds=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        unlink_shared_memory(self.group, get_tp_group())
        self._sent: list[
            tuple[Any, torch.Tensor, Any]
        ] = []  # a tensor must live until it is sent
        self._expected: tuple[Any, torch.Tensor] | None = None

    def send_tokens(self, tokens: np.ndarray) -> None:
        """Send a token per request of the batch."""
        self._send(
            torch.from_numpy(np.array(tokens, dtype=np.int64)).view(torch.uint8),
            self.group.cpu_group,
        )

    def expect_tokens(self, count: int) -> None:
        """Post the receive of a batch's tokens."""
        self._expect(count * _NUMBER)

    def tokens(self) -> np.ndarray:
        """Wait for the expected tokens: [count] int64."""
        return self._wait_for_expected().view(torch.int64).numpy()

    def send_frame(
        self, rows: np.ndarray, state: CutState | None, count: int, counted: np.ndarray
    ) -> None:
        """Send states of some rows of a batch.

        Args:
            rows: [rows] to send; an empty array ends the step.
            state: (hidden, residual) [rows, hidden] each.
            count: requests of the batch.
            counted: [counters] float64 of our counters, which the last stage reports to
                vLLM.
        """
        frame = torch.zeros(self._frame_bytes(count), dtype=torch.uint8)
        frame[:_COUNTED].view(torch.float64)[:] = torch.from_numpy(counted)
        frame[_COUNTED : self._head(count)].view(torch.int64)[
            torch.from_numpy(rows)
        ] = 1
        if state is not None and self.inline:
            for part, place in zip(state, self._states_in(frame, count), strict=True):
                assert part is not None
                place[: len(rows)] = part
        self._send(frame, self.group.cpu_group)
        if state is not None and not self.inline:
            for part in state:
                assert part is not None
                self._send(part.contiguous(), self.group.device_group)

    def expect_frame(self, count: int) -> None:
        """Post the receive of a batch's frame."""
        self._expect(self._frame_bytes(count))

    def frame(self, count: int) -> tuple[np.ndarray, CutState, np.ndarray]:
        """Wait for the expected frame: (rows, their states, the first stage's counters)."""
        frame = self._wait_for_expected()
        counted = frame[:_COUNTED].view(torch.float64).numpy()
        rows = np.flatnonzero(
            frame[_COUNTED : self._head(count)].view(torch.int64).numpy()
        )
        if self.inline:
            hidden, residual = self._states_in(frame, count)
            return rows, (hidden[: len(rows)], residual[: len(rows)]), counted
        parts = [
            torch.empty(
                len(rows), self.hidden_size, dtype=self.dtype, device=self.device
            )
            for _ in range(2)
        ]
        for part in parts if len(rows) else ():
            self._wait(
                distributed.irecv(part, self.peer, group=self.group.device_group),
                self.group.device_group,
            )
        return rows, (parts[0], parts[1]), counted

    def _head(self, count: int) -> int:
        """Bytes of a frame before the states."""
        return _COUNTED + count * _NUMBER

    def _frame_bytes(self, count: int) -> int:
        states = (
            2 * count * self.hidden_size * self.dtype.itemsize if self.inline else 0
        )
        return self._head(count) + states

    def _states_in(self, frame: torch.Tensor, count: int) -> torch.Tensor:
        """[2, count, hidden] in a frame."""
        return (
            frame[self._head(count) :].view(self.dtype).view(2, count, self.hidden_size)
        )

    def _send(self, tensor: torch.Tensor, group: Any) -> None:
        while len(self._sent) > 2:  # a frame and its states
            work, _, its_group = self._sent.pop(0)
            self._wait(work, its_group)
        self._sent.append(
            (distributed.isend(tensor, self.peer, group=group), tensor, group)
        )

    def _expect(self, size: int) -> None:
        assert self._expected is None
        buffer = torch.empty(size, dtype=torch.uint8)
        self._expected = (
            distributed.irecv(buffer, self.peer, group=self.group.cpu_group),
            buffer,
        )

    def _wait_for_expected(self) -> torch.Tensor:
        assert self._expected is not None
        (work, buffer), self._expected = self._expected, None
        self._wait(work, self.group.cpu_group)
        return buffer

    def _wait(self, work: distributed.Work | None, group: Any) -> None:
        """On a device channel the stream waits, not the host: with a bound NCCL would
        poll once a millisecond.
        """
        assert work is not None  # this rank is in the group
        if self.inline or group is self.group.cpu_group:
            work.wait(self.bound)
        else:
            work.wait()
