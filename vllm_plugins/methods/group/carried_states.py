# SPDX-License-Identifier: Apache-2.0
"""States after d_bar that the first stage keeps: of tokens in flight, and of the next
step's first.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates


class CarriedStates:
    """A state per batch row; arguments as SavedStates'."""

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        has_residual: bool,
    ) -> None:
        self._saved = SavedStates(rows, hidden_size, dtype, device, has_residual)
        self._device = device
        self._next: dict[
            str, tuple[int, int]
        ] = {}  # request -> (row, position) of its next token

    def store(self, rows: np.ndarray, state: CutState) -> None:
        """Copy the states of batch rows in."""
        self._saved.store(async_tensor_h2d(rows, device=self._device), state)

    def load(self, rows: np.ndarray) -> CutState:
        """Copies of the states of batch rows."""
        return self._saved.load(async_tensor_h2d(rows, device=self._device))

    def clear(self) -> None:
        """Carry nothing over."""
        self._next = {}

    def carry(self, names: list[str], rows: np.ndarray, positions: np.ndarray) -> None:
        """Mark the states of batch rows as valid for the next step.

        Args:
            names: request of each batch row.
            rows: [requests] batch rows.
            positions: [requests] of the tokens that the states are of.
        """
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        self._next = {names[row]: (row, position) for row, position in places}

    def of(self, names: list[str], positions: np.ndarray) -> CutState | None:
        """The states of a step's tokens, a token per request; None if any of them has none."""
        rows = []
        for name, position in zip(names, positions.tolist(), strict=True):
            row, carried_position = self._next.get(name, (NO_ROW, NO_ROW))
            if carried_position != position:
                return None
            rows.append(row)
        return self.load(np.array(rows, dtype=np.int64))


NO_ROW = -1
