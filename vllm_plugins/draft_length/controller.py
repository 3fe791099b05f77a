# SPDX-License-Identifier: Apache-2.0
"""The choice of the number of drafts by expected tokens over cost, without reading a
clock.

With s_i the probability that a request's first i drafts are accepted and c(n) the cost
of a step with n drafts, relative to one without, a batch of B requests gives (B + sum
over requests of s_1 + ... + s_n) / c(n) tokens per unit of cost, and B without drafts.
Of the n whose cost was measured, the best is taken.

WARMUP     as DRAFTING, while drafts of some kind in the batch were never verified, and
           their acceptance is a guess
DRAFTING   drafts pay; every EXPLORE_LONGER choices, the next larger number is tried
OFF        drafts do not pay
EXPLORING  a step with drafts nevertheless: after a wait that doubles, until such steps
           take a fixed share of the time, and again as long as what they emit pays for
           them
"""

from enum import Enum, auto

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts

MEMORY = 64  # drafts per request and position that count
PRIOR_MEMORY = 256  # the same for all requests together
PRIOR_WEIGHT = 8.0  # number of a request's drafts that weigh as much as the prior
KINDS = 2  # kinds of the method's drafts
# Prior acceptance, and the number of drafts for which it counts
GUESS = 0.6
GUESS_WEIGHT = 6.0
# Factors on a request's and on all requests' counts when they may be out of date
DECAY = (
    0.5,
    0.8,
)


class Acceptance:
    """Decaying counts of accepted drafts, in the order of the batch.

    Args:
        most: most drafts of a request, N.
        kinds: of drafts, each with its own prior: the method's drafts of sampling and
            of greedy requests (KINDS), then looked-up drafts, for which the prior says
            more than their request does.
    """

    def __init__(self, most: int, kinds: int) -> None:
        self.most = most
        self.hits = np.zeros((0, most))  # [rows, N] accepted drafts by position
        # [rows, N] drafts whose predecessors were accepted
        self.trials = np.zeros((0, most))
        self.kinds = np.zeros(0, dtype=np.int64)  # [rows] kind of each row's drafts
        # [kinds, N] trials of all requests
        self.prior_trials = np.full((kinds, most), GUESS_WEIGHT)
        self.prior_hits = GUESS * self.prior_trials
        self._req_ids: list[str] = []

    def align(self, req_ids: list[str]) -> None:
        """Follow the order of a batch; new requests start without counts."""
        if req_ids == self._req_ids:
            return
        row_of = {req_id: row for row, req_id in enumerate(self._req_ids)}
        rows = np.array([row_of.get(req_id, -1) for req_id in req_ids], dtype=np.int64)
        for name in ("hits", "trials", "kinds"):
            setattr(self, name, reordered(getattr(self, name), rows))
        self._req_ids = list(req_ids)

    def learn(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Count a step.

        Args:
            drafts: [rows] verified drafts.
            accepted: [rows] how many of them were accepted.
        """
        position = np.arange(self.most)
        # Drafts after a rejected one were not tried.
        trials = (position < drafts[:, None]) & (position <= accepted[:, None])
        hits = trials & (position < accepted[:, None])
        kept = 1 - trials / MEMORY
        by_method = (self.kinds < KINDS)[:, None]
        self.hits = np.where(by_method, self.hits * kept + hits, self.hits)
        self.trials = np.where(by_method, self.trials * kept + trials, self.trials)
        for kind in np.unique(self.kinds[drafts > 0]):
            rows = self.kinds == kind
            tried = trials[rows].sum(axis=0)
            kept = (1 - 1 / PRIOR_MEMORY) ** tried
            self.prior_hits[kind] = self.prior_hits[kind] * kept + hits[rows].sum(
                axis=0
            )
            self.prior_trials[kind] = self.prior_trials[kind] * kept + tried

    def probabilities(self) -> np.ndarray:
        """s_1, s_2, ...: probability that a request's first i drafts are all accepted:
        [rows, N].
        """
        prior = (self.prior_hits / self.prior_trials)[self.kinds]
        requests = (self.hits + PRIOR_WEIGHT * prior) / (self.trials + PRIOR_WEIGHT)
        return np.cumprod(
            np.where((self.kinds < KINDS)[:, None], requests, prior), axis=1
        )

    def decay(self) -> None:
        """Decay the counts of the batch's requests and of their kinds, since the text
        may have changed.
        """
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


EXPLORE_LONGER = 32  # choices in DRAFTING
STARTS = 1.03  # expected speed-up at which drafting starts; it stops below 1


class State(Enum):
    WARMUP = auto()
    DRAFTING = auto()
    OFF = auto()
    EXPLORING = auto()


class DraftLengthController:
    """A deterministic controller: the same table and steps give the same choices.

    Args:
        costs: of steps with up to N drafts.
        kinds: see Acceptance.
        first_wait: choices in OFF before an exploration step.
        explored: share of the time in OFF that explorations take, in the long run.
    """

    def __init__(
        self, costs: StepCosts, kinds: int, first_wait: int, explored: float
    ) -> None:
        self.costs = costs
        self.first_wait = first_wait
        self.explored = explored
        self.acceptance = Acceptance(costs.most, kinds)
        self.state = State.WARMUP
        self._tried: set[int] = set()  # kinds with verified drafts
        self._steps = self._explored = (
            0  # steps so far, and the step of the last exploration
        )
        # Steps until the next exploration, and its cost
        self._wait = first_wait
        self._cost = 1.0
        self._paid = False  # whether the last exploration step paid off

    def observe(
        self,
        req_ids: list[str],
        emitted: np.ndarray,
        drafts: np.ndarray,
        kinds: np.ndarray,
    ) -> None:
        """Count the accepted drafts of a step.

        Args:
            req_ids: of the batch rows.
            emitted: [rows] tokens that each row emitted.
            drafts, kinds: [rows] that were verified.
        """
        self.acceptance.align(req_ids)
        self.acceptance.kinds = kinds
        self.acceptance.learn(drafts, emitted - 1)
        self._tried |= set(kinds[drafts > 0].tolist())
        self._paid = self.state is State.EXPLORING and emitted.mean() > self._cost

    def choose(self, allowed: np.ndarray, kinds: np.ndarray) -> int:
        """The number of drafts of each request that may draft, 0 for none.

        Args:
            allowed: [rows] whether each row may draft.
            kinds: [rows] kind of each row's drafts.
        """
        self._steps += 1
        self.acceptance.kinds = kinds
        if not allowed.any():
            return 0
        costs = self.costs.relative(len(allowed))
        # Accepted drafts by the number of drafts, from 1 on
        accepted = self.acceptance.probabilities()[allowed].sum(axis=0).cumsum()
        gains = {
            count: (1 + accepted[count - 1] / len(allowed)) / costs[count]
            for count in self.costs.counts
        }
        best = max(gains, key=lambda count: gains[count])
        gain = gains[best]
        cost = float(costs[best])
        paused = self.state in (State.OFF, State.EXPLORING)
        if gain >= (STARTS if paused else 1.0):
            known = self._tried.issuperset(kinds.tolist())
            self.state = State.DRAFTING if known else State.WARMUP
            self._wait = self.first_wait
            if paused:
                self._explored = self._steps
            if self._steps - self._explored >= EXPLORE_LONGER:
                self._explored = self._steps
                return min(
                    (count for count in self.costs.counts if count > best), default=best
                )
            return best
        self._cost = cost
        if not paused:
            self.state = State.OFF
            self._explored = self._steps
        if not self._paid and self._steps < self._explored + self._wait:
            self.state = State.OFF
            return 0
        if not self._paid:
            self.acceptance.decay()
            self._wait = min(
                2 * self._wait,
                max(2 * self.first_wait, int((cost - 1) / self.explored)),
            )
        self.state = State.EXPLORING
        self._explored = self._steps
        return best
