# SPDX-License-Identifier: Apache-2.0
"""What each request has emitted in a group step, as the first stage knows it."""

from collections.abc import Sequence

import numpy as np


class Progress:
    """A group step for the first stage; every array has an entry per batch row.

    A request's token at hand is ready (its state after d_bar exists), missed (it must
    still run through the first stage), or out (the request ended).

    Args:
        positions: of the scheduled tokens.
        allowance: tokens that each request may emit.
        lengths: the most tokens of each request, prompt included.
        stops: tokens that end each request.
    """

    def __init__(
        self,
        positions: np.ndarray,
        allowance: np.ndarray,
        lengths: np.ndarray,
        stops: Sequence[set[int]],
    ) -> None:
        count = len(positions)
        self.lengths = lengths
        self.stops = stops
        self.position = positions.copy()  # of the token at hand
        # The token at hand, once one was emitted
        self.token = np.zeros(count, dtype=np.int64)
        self.allowance = allowance
        self.emitted = np.zeros(count, dtype=np.int64)
        self.ready = np.ones(count, dtype=bool)
        self.missed = np.zeros(count, dtype=bool)

    def sendable(self) -> np.ndarray:
        """Rows that are ready and may emit another token."""
        allowed = self.emitted < self.allowance
        return np.flatnonzero(self.ready & allowed)

    def waits_for_missed(self) -> bool:
        """Whether a missed token could still be ended in this step."""
        allowed = self.emitted < self.allowance
        return bool((self.missed & allowed).any())

    def with_candidates(self, rows: np.ndarray) -> np.ndarray:
        """The given rows whose next token cannot be their last."""
        return rows[self.position[rows] + 2 < self.lengths[rows]]

    def emit(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Record the target's next token of some rows: which of them continue [rows] bool."""
        self.emitted[rows] += 1
        self.token[rows] = tokens
        self.position[rows] += 1
        self.ready[rows] = False
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        stopped = [token in self.stops[row] for row, token in pairs]
        continues: np.ndarray = self.position[rows] + 1 < self.lengths[rows]
        return continues & ~np.array(stopped, dtype=bool)
