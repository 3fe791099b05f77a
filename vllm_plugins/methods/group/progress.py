# SPDX-License-Identifier: Apache-2.0
"""What each request has emitted in a group step, and the states that the first stage keeps:
of tokens in flight, and of the next step's first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates

NO_ROW = -1
NO_ID = -1


class CarriedStates:
    """A state per batch row, and which of them the next step may use.

    Args:
        saved: a state for each batch row.
    """

    def __init__(self, saved: SavedStates) -> None:
        self._saved = saved
        self._device = saved.hidden.device
        # Request -> (row, position) of its next token
        self._next: dict[str, tuple[int, int]] = {}

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


class End(NamedTuple):
    """Where a request ends, as far as the first stage knows."""

    length: int  # most tokens, prompt included
    stop_token_ids: list[int]

    @classmethod
    def of(cls, request: Any, max_model_len: int) -> "End":
        """The end of a request of vLLM's scheduler, a NewRequestData."""
        params = request.sampling_params
        stops = (params.eos_token_id, *(params.stop_token_ids or ()))
        return cls(
            min(request.prompt_len + params.max_tokens, max_model_len),
            [token for token in stops if token is not None],
        )


class Progress:
    """A group step for the first stage; every array has an entry per batch row.

    A request's token at hand is ready (its state after d_bar exists), missed (it must
    still run through the first stage), or out (the request ended).

    Args:
        positions: of the scheduled tokens.
        allowance: tokens that each request may emit.
        ends: of the requests.
    """

    def __init__(
        self, positions: np.ndarray, allowance: np.ndarray, ends: Sequence[End]
    ) -> None:
        count = len(positions)
        self.lengths = np.array([end.length for end in ends], dtype=np.int64)
        longest = max(len(end.stop_token_ids) for end in ends)
        self.stops = np.full((count, longest), NO_ID, dtype=np.int64)
        for row, end in enumerate(ends):
            self.stops[row, : len(end.stop_token_ids)] = end.stop_token_ids
        self.position = positions.copy()  # of the token at hand
        # The token at hand, once one was emitted
        self.token = np.zeros(count, dtype=np.int64)
        self.allowance = allowance
        self.emitted = np.zeros(count, dtype=np.int64)
        self.ready = np.ones(count, dtype=bool)
        self.missed = np.zeros(count, dtype=bool)

    def sendable(self) -> np.ndarray:
        """Rows that are ready and may emit another token."""
        return np.flatnonzero(self.ready & (self.emitted < self.allowance))

    def waits_for_missed(self) -> bool:
        """Whether a missed token could still be ended in this step."""
        return bool((self.missed & (self.emitted < self.allowance)).any())

    def with_candidates(self, rows: np.ndarray) -> np.ndarray:
        """The given rows whose next token cannot be their last."""
        return rows[self.position[rows] + 2 < self.lengths[rows]]

    def emit(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Record the target's next token of some rows: which of them continue [rows] bool."""
        self.emitted[rows] += 1
        self.token[rows] = tokens
        self.position[rows] += 1
        self.ready[rows] = False
        ended = self.position[rows] + 1 >= self.lengths[rows]
        return ~(ended | (self.stops[rows] == tokens[:, None]).any(axis=1))
