# SPDX-License-Identifier: Apache-2.0
"""How often drafts are accepted, by position: a request's own counts over a prior of all requests' counts."""

from __future__ import annotations

import numpy as np

MEMORY = 64  # drafts of a request that count, at each position
PRIOR_MEMORY = 256  # and of all requests together
PRIOR_WEIGHT = 8.0  # a request's own drafts that weigh as much as the prior
GUESS, GUESS_WEIGHT = 0.6, 6.0  # acceptance before any draft was verified, and the drafts that it counts for
DECAY = 0.5, 0.8  # of a request's counts and of all requests', when they may no longer hold


class Acceptance:
    """Decaying counts in the order of the batch.

    Args:
        most: most drafts of a request, N.
        kinds: of drafts with a prior of their own, such as those of greedy and of sampling requests.
        prior_weight: drafts of a request that weigh as much as the prior.
    """

    def __init__(self, most: int, kinds: int = 2, prior_weight: float = PRIOR_WEIGHT) -> None:
        self.most, self.prior_weight = most, prior_weight
        self.hits = np.zeros((0, most))  # [rows, N] accepted drafts by position
        self.trials = np.zeros((0, most))  # [rows, N] drafts whose predecessors were accepted
        self.kinds = np.zeros(0, dtype=np.int64)  # [rows] kind of each row's drafts
        # [kinds, N] the same over all requests
        self.prior_trials = np.full((kinds, most), GUESS_WEIGHT)
        self.prior_hits = GUESS * self.prior_trials
        self._req_ids: list[str] = []

    def align(self, req_ids: list[str]) -> np.ndarray | None:
        """Take the order of a batch; nothing is known of new requests.

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

    def learn(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Count a step.

        Args:
            drafts: [rows] verified drafts.
            accepted: [rows] how many of them were accepted.
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
            kept = (1 - 1 / PRIOR_MEMORY) ** tried
            self.prior_hits[kind] = self.prior_hits[kind] * kept + hits[rows].sum(axis=0)
            self.prior_trials[kind] = self.prior_trials[kind] * kept + tried

    def probabilities(self) -> np.ndarray:
        """s_1, s_2, ...: probability that a request's first i drafts are all accepted: [rows, N]."""
        prior = (self.prior_hits / self.prior_trials)[self.kinds]
        return np.cumprod((self.hits + self.prior_weight * prior) / (self.trials + self.prior_weight), axis=1)

    def decay(self) -> None:
        """Believe less of what is known of the requests at hand and of their kinds: the text may have changed."""
        self.hits *= DECAY[0]
        self.trials *= DECAY[0]
        kinds = np.unique(self.kinds)
        self.prior_hits[kinds] *= DECAY[1]
        self.prior_trials[kinds] *= DECAY[1]


def reordered(old: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """old[rows], with zeros where a row is -1."""
    new = np.zeros((len(rows), *old.shape[1:]), dtype=old.dtype)
    new[rows >= 0] = old[rows[rows >= 0]]
    return new
