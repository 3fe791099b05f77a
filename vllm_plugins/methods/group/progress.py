# SPDX-License-Identifier: Apache-2.0
"""The progress of each request in a group step: its current token, whether its state is ready, and its end."""

import numpy as np

from vllm_ppd.vllm_plugins.engine.v1.batch import Batch

_NO_ID = -1


def limits(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The ends of a batch's requests, as far as a stage knows them.

    Returns:
        (tokens of each whole request [batch rows], its stop tokens [batch rows, most of any], padded with -1).
    """
    params = batch.sampling_params
    most = [batch.max_model_len if p.max_tokens is None else p.max_tokens for p in params]
    ends = np.minimum(batch.prompt_lengths + np.array(most, dtype=np.int64), batch.max_model_len)
    known = [[token for token in (p.eos_token_id, *(p.stop_token_ids or ())) if token is not None] for p in params]
    stops = np.full((len(params), max(map(len, known), default=0)), _NO_ID, dtype=np.int64)
    for row, ids in enumerate(known):
        stops[row, : len(ids)] = ids
    return ends, stops


class Progress:
    """A group step for the first stage; every array has an entry per batch row.

    A request's current token is ready (its state after d_bar exists), missed (it must still run through the first
    stage), or out (the request ended).
    """

    def __init__(self, positions: np.ndarray, allowance: np.ndarray, micro_steps: int, batch: Batch) -> None:
        count = len(positions)
        self.ends, self.stops = limits(batch)
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
        """The given rows whose next token cannot be their last."""
        return rows[self.position[rows] + 2 < self.ends[rows]]

    def emit(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Record the target's next token of some rows; returns which of them continue: [rows] bool."""
        self.tokens[rows, self.emitted[rows]] = tokens
        self.emitted[rows] += 1
        self.token[rows] = tokens
        self.position[rows] += 1
        self.ready[rows] = False
        ended = self.position[rows] + 1 >= self.ends[rows]
        return ~(ended | (self.stops[rows] == tokens[:, None]).any(axis=1))
