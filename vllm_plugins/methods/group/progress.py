# SPDX-License-Identifier: Apache-2.0
"""Where each request of a group step stands: the token at hand, whether its state is ready, where the request ends."""

from __future__ import annotations

import numpy as np

from vllm_ppd.vllm_plugins.engine.v1.batch import Batch

_NO_ID = -1


class Limits:
    """Where requests end, as far as a stage can see it: length and stop tokens; looked up once a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._req_ids: list[str] = []
        self.ends = np.zeros(0, dtype=np.int64)  # [batch rows] tokens of the whole request
        self.stops = np.zeros((0, 1), dtype=np.int64)  # [batch rows, most stop tokens] padded with -1

    def forget(self) -> None:
        """Look every request up again: a name may have been given to another."""
        self._req_ids = []

    def look_up(self) -> None:
        """Have ends and stops for the batch as it is."""
        batch = self.batch
        if self._req_ids == batch.req_ids:
            return
        params = batch.sampling_params
        most = [batch.max_model_len if p.max_tokens is None else p.max_tokens for p in params]
        lengths = batch.prompt_lengths.astype(np.int64) + np.array(most, dtype=np.int64)
        self.ends = np.minimum(lengths, batch.max_model_len)
        stops = [[p.eos_token_id, *(p.stop_token_ids or ())] for p in params]
        self.stops = np.full((len(stops), max(map(len, stops))), _NO_ID, dtype=np.int64)
        for row, ids in enumerate(stops):
            known = [token for token in ids if token is not None]
            self.stops[row, : len(known)] = known
        self._req_ids = list(batch.req_ids)


class Progress:
    """A group step as the first stage sees it; every array has a place a batch row.

    A request's token at hand is ready (its state behind d_bar is there), missed (it has still to run through the first
    stage), or out (the request ended).
    """

    def __init__(self, positions: np.ndarray, allowance: np.ndarray, micro_steps: int, limits: Limits) -> None:
        count = len(positions)
        limits.look_up()
        self.limits = limits
        self.position = positions.copy()  # of the token at hand
        self.token = np.zeros(count, dtype=np.int64)  # the token at hand, once one was emitted
        self.allowance = allowance
        self.emitted = np.zeros(count, dtype=np.int64)
        self.tokens = np.zeros((count, micro_steps), dtype=np.int64)  # emitted so far
        self.ready = np.ones(count, dtype=bool)
        self.missed = np.zeros(count, dtype=bool)

    def sendable(self) -> np.ndarray:
        """Rows that are ready and may emit another token."""
        return np.flatnonzero(self.ready & (self.emitted < self.allowance))

    def waits_for_missed(self) -> bool:
        """Whether a missed token could still be ended in this step."""
        return bool((self.missed & (self.emitted < self.allowance)).any())

    def with_candidates(self, rows: np.ndarray) -> np.ndarray:
        """Those of some rows whose next token cannot be their last."""
        return rows[self.position[rows] + 2 < self.limits.ends[rows]]

    def emit(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take in the target's next token of some rows; returns which of them go on: [rows] bool."""
        self.tokens[rows, self.emitted[rows]] = tokens
        self.emitted[rows] += 1
        self.token[rows] = tokens
        self.position[rows] += 1
        self.ready[rows] = False
        ended = self.position[rows] + 1 >= self.limits.ends[rows]
        return ~(ended | (self.limits.stops[rows] == tokens[:, None]).any(axis=1))
