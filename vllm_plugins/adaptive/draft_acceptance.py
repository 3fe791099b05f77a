# SPDX-License-Identifier: Apache-2.0
"""How often drafts are accepted, by position: of each request, and of all requests whose drafts are of one kind."""

from __future__ import annotations

import numpy as np

MEMORY = 64  # drafts of a request that count, at each position
SERVER_MEMORY = 256  # and of all requests
BELIEF = 8.0  # drafts of a request that weigh as much as what the others' acceptance says of it
FIRST_GUESS, GUESS_WEIGHT = 0.6, 1.5  # acceptance before any draft was seen, and the drafts that it counts for
FIRST_WEIGHT = 6.0  # and how many more it does at first: a few bad drafts must not end what has just begun
NEVER = -1
FADE, SERVER_FADE = 0.5, 0.8  # of a request's and of all requests' drafts, where they may no longer hold


class DraftAcceptance:
    """Counts that fade, in the order of the batch.

    Args:
        most: most drafts of a request, N.
        kinds: of drafts whose acceptance is known apart, as those of greedy and of sampling requests.
        belief: drafts of a request that weigh as much as what the others' acceptance says of it.
    """

    def __init__(self, most: int, kinds: int = 2, belief: float = BELIEF) -> None:
        self.most, self.belief = most, belief
        self.hits = np.zeros((0, most))  # [rows, N] accepted drafts by position
        self.trials = np.zeros((0, most))  # [rows, N] and those whose predecessors were accepted
        self.kinds = np.zeros(0, dtype=np.int64)  # [rows] of what each drafts
        # [kinds, N] the same over all requests
        self._server_trials = np.full((kinds, most), FIRST_WEIGHT)
        self._server_hits = FIRST_GUESS * self._server_trials
        self._tried_at = np.full(kinds, NEVER)  # the step at which each kind was drafted last
        self._req_ids: list[str] = []

    def align(self, req_ids: list[str]) -> np.ndarray | None:
        """Take the order of a batch; of new requests nothing is known.

        Returns:
            [rows] the row that each had before, -1 for new ones; None if nothing has changed.
        """
        if req_ids == self._req_ids:
            return None
        row_of = {req_id: row for row, req_id in enumerate(self._req_ids)}
        rows = np.array([row_of.get(req_id, -1) for req_id in req_ids], dtype=np.int64)
        for name in ("hits", "trials", "kinds"):
            setattr(self, name, reordered(getattr(self, name), rows))
        self._req_ids = list(req_ids)
        return rows

    def set_kinds(self, kinds: np.ndarray) -> bool:
        """Say what kind of drafts each row would make: [rows]; returns whether any has changed."""
        before, self.kinds = self.kinds, kinds.astype(np.int64)
        return not np.array_equal(before, self.kinds)

    @property
    def tried(self) -> bool:
        """Whether drafts were verified of each kind that the requests at hand would make."""
        return bool((self._tried_at[self.kinds] > NEVER).all())

    def learn(self, drafts: np.ndarray, accepted: np.ndarray, step: int) -> None:
        """Count a step.

        Args:
            drafts: [rows] that each had.
            accepted: [rows] how many of them were accepted.
            step: its number.
        """
        position = np.arange(self.most)
        # Drafts behind a rejected one were not tried.
        trials = (position < drafts[:, None]) & (position <= accepted[:, None])
        hits = trials & (position < accepted[:, None])
        kept = 1 - trials / MEMORY
        self.hits, self.trials = self.hits * kept + hits, self.trials * kept + trials
        for kind in np.unique(self.kinds[drafts > 0]):
            rows = self.kinds == kind
            tried = trials[rows].sum(axis=0)
            kept = (1 - 1 / SERVER_MEMORY) ** tried
            self._server_hits[kind] = self._server_hits[kind] * kept + hits[rows].sum(axis=0)
            self._server_trials[kind] = self._server_trials[kind] * kept + tried
            self._tried_at[kind] = step

    def probabilities(self, own: float = 1.0) -> np.ndarray:
        """s_1, s_2, ...: that a request's first i drafts are all accepted: [rows, N].

        Requests' own drafts count for `own` of themselves.
        """
        server = (self._server_hits + FIRST_GUESS * GUESS_WEIGHT) / (self._server_trials + GUESS_WEIGHT)
        hits = own * self.hits + self.belief * server[self.kinds]
        return np.cumprod(hits / (own * self.trials + self.belief), axis=1)

    def fade(self) -> None:
        """Believe less of what is known of the requests at hand and of drafts of their kinds."""
        self.hits *= FADE
        self.trials *= FADE
        self._fade(np.unique(self.kinds))

    def fade_idle(self, since: int) -> None:
        """Believe less of kinds that were not drafted since a step."""
        self._fade(np.flatnonzero(self._tried_at <= since))

    def _fade(self, kinds: np.ndarray) -> None:
        kinds = kinds[self._tried_at[kinds] > NEVER]  # a first guess is no less likely later on
        self._server_hits[kinds] *= SERVER_FADE
        self._server_trials[kinds] *= SERVER_FADE


def reordered(old: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """old[rows], with zeros where a row is -1."""
    new = np.zeros((len(rows), *old.shape[1:]), dtype=old.dtype)
    new[rows >= 0] = old[rows[rows >= 0]]
    return new
