# SPDX-License-Identifier: Apache-2.0
"""States after d_bar that the first stage keeps: of tokens in flight, and of the next step's first tokens."""

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates


class CarriedStates:
    """A state per batch row; further arguments as SavedStates'.

    Args:
        requests: the most requests of a group step.
    """

    def __init__(
        self, requests: int, hidden_size: int, dtype: torch.dtype, device: torch.device, has_residual: bool
    ) -> None:
        self._saved, self._device = SavedStates(requests, hidden_size, dtype, device, has_residual), device
        self._next: dict[str, tuple[int, int, int]] = {}  # request -> (row, position, token) of its next step

    def store(self, rows: np.ndarray, state: CutState) -> None:
        """Copy the states of batch rows in."""
        self._saved.store(torch.from_numpy(rows).to(self._device), state)

    def load(self, rows: np.ndarray) -> CutState:
        """Copies of the states of batch rows."""
        return self._saved.load(torch.from_numpy(rows).to(self._device))

    def clear(self) -> None:
        """Carry nothing over."""
        self._next = {}

    def carry(self, names: list[str], rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Mark the states of batch rows as valid for the next step.

        Args:
            names: request of each batch row.
            rows: [requests] batch rows.
            positions, tokens: [requests] of the tokens that the states are of.
        """
        entries = zip(rows.tolist(), positions.tolist(), tokens.tolist(), strict=True)
        self._next = {names[row]: (row, position, token) for row, position, token in entries}

    def of(self, names: list[str], positions: np.ndarray, tokens: np.ndarray) -> CutState | None:
        """The states of a step's tokens, a token per request; None if any of them has none."""
        rows = []
        for name, position, token in zip(names, positions.tolist(), tokens.tolist(), strict=True):
            row, *where = self._next.get(name, (-1, -1, -1))
            if where != [position, token]:
                return None
            rows.append(row)
        return self.load(np.array(rows, dtype=np.int64))
