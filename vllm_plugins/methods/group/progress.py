# SPDX-License-Identifier: Apache-2.0
"""The progress of each request in a group step: its token at hand, that token's state, its end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NO_ID = -1


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
        self.token = np.zeros(
            count, dtype=np.int64
        )  # the token at hand, once one was emitted
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
