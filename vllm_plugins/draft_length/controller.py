# SPDX-License-Identifier: Apache-2.0
"""The choice of the number of drafts of each step by expected tokens over cost, without reading a clock.

With s_i the probability that a request's first i drafts are accepted and c(n) the cost of a step with n drafts, a batch
of B requests gives (B + sum over requests of s_1 + ... + s_n) / c(n) tokens per unit of cost. The n that maximises this
is taken; n = 0, vLLM's own step, is one of them.

WARMUP     as DRAFTING, while drafts of some kind in the batch were never verified, and their acceptance is a guess
DRAFTING   drafts pay; every EXPLORE_LONGER steps, a step has one draft more than usual, for every request
OFF        drafts do not pay
EXPLORING  a step with drafts nevertheless: after 16, 32, 64, ... steps in OFF, until such steps take EXPLORED of the
           time (256 steps where a draft costs a step), and again as long as what they emit pays for them
"""

from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts

MEMORY = 64  # drafts per request and position that count
PRIOR_MEMORY = 256  # the same for all requests together
PRIOR_WEIGHT = 8.0  # number of a request's drafts that weigh as much as the prior
KINDS = 2  # kinds of the method's drafts
GUESS, GUESS_WEIGHT = 0.6, 6.0  # prior acceptance, and the number of drafts for which it counts
DECAY = 0.5, 0.8  # factors on a request's and on all requests' counts when they may be out of date


class Acceptance:
    """Decaying counts of accepted drafts, in the order of the batch.

    Args:
        most: most drafts of a request, N.
        kinds: of drafts, each with its own prior: the method's drafts of sampling and of greedy requests (KINDS), then
            looked-up drafts, for which the prior says more than their request does.
    """

    def __init__(self, most: int, kinds: int = KINDS) -> None:
        self.most = most
        self.hits = np.zeros((0, most))  # [rows, N] accepted drafts by position
        self.trials = np.zeros((0, most))  # [rows, N] drafts whose predecessors were accepted
        self.kinds = np.zeros(0, dtype=np.int64)  # [rows] kind of each row's drafts
        # [kinds, N] trials of all requests
        self.prior_trials = np.full((kinds, most), GUESS_WEIGHT)
        self.prior_hits = GUESS * self.prior_trials
        self._req_ids: list[str] = []

    def align(self, req_ids: list[str]) -> np.ndarray | None:
        """Follow the order of a batch; new requests start without counts.

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
            self.prior_hits[kind] = self.prior_hits[kind] * kept + hits[rows].sum(axis=0)
            self.prior_trials[kind] = self.prior_trials[kind] * kept + tried

    def probabilities(self, kinds: np.ndarray | None = None) -> np.ndarray:
        """s_1, s_2, ...: probability that a request's first i drafts are all accepted: [rows, N].

        Args:
            kinds: [rows] of the drafts (None: as they are).
        """
        kinds = self.kinds if kinds is None else kinds
        prior = (self.prior_hits / self.prior_trials)[kinds]
        requests = (self.hits + PRIOR_WEIGHT * prior) / (self.trials + PRIOR_WEIGHT)
        return np.cumprod(np.where((kinds < KINDS)[:, None], requests, prior), axis=1)

    def expected(self, kinds: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Expected accepted drafts of each request, for drafts of these kinds and numbers: [rows]."""
        return (self.probabilities(kinds) * (np.arange(self.most) < drafts[:, None])).sum(axis=1)

    def decay(self) -> None:
        """Decay the counts of the batch's requests and of their kinds, since the text may have changed."""
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


FIRST_WAIT = 16  # steps in OFF before an exploration step
EXPLORED = 1 / 256  # share of the time in OFF, in the long run
EXPLORE_LONGER = 128  # steps in DRAFTING
STARTS = 1.03  # expected speed-up at which drafting starts; it stops below 1


class State(Enum):
    WARMUP = auto()
    DRAFTING = auto()
    OFF = auto()
    EXPLORING = auto()


class Choice(NamedTuple):
    """A number of drafts for a step."""

    number: int  # n, at least 1
    gain: float  # expected speed-up
    cost: float  # of the step, relative to a step without drafts
    allowed: np.ndarray  # [rows] drafts allowed for each request, which may be fewer than n
    drafts: np.ndarray  # [rows] allowed drafts that are expected to pay off


class DraftLengthController:
    """A deterministic controller: the same table and steps give the same choices.

    Args:
        costs: of steps with up to N drafts.
        kinds: see Acceptance.
        counts: numbers of drafts beside 0 that a step may have, each of them for every request (None: any, and fewer
            for a request whose drafts do not pay).
        first_wait: choices in OFF before an exploration step.
        explored: of the time in OFF, in the long run.
    """

    def __init__(
        self,
        costs: StepCosts,
        kinds: int = KINDS,
        counts: tuple[int, ...] | None = None,
        first_wait: int = FIRST_WAIT,
        explored: float = EXPLORED,
    ) -> None:
        self.costs, self.counts = costs, counts
        self.first_wait, self.explored = first_wait, explored
        self.acceptance = Acceptance(costs.most, kinds)
        self.state = State.WARMUP
        self.gain = 1.0  # expected speed-up of the last choice; infinite for an exploration step
        self.suppressed = 0  # drafts suppressed by the last choice
        self._drafts = np.zeros(0, dtype=np.int64)  # [rows] in the current step
        self._tried: set[int] = set()  # kinds with verified drafts
        self._steps = self._explored = 0  # steps so far, and the step of the last exploration
        self._wait, self._cost = first_wait, 1.0  # steps until the next exploration, and its cost
        self._paid = False  # whether the last exploration step paid off
        self._free = True  # whether any request may draft

    def observe(
        self,
        req_ids: list[str],
        emitted: np.ndarray,
        drafts: np.ndarray | None = None,
        kinds: np.ndarray | None = None,
    ) -> None:
        """Count the accepted drafts of the step that ended.

        Args:
            req_ids: of the batch rows.
            emitted: [rows] tokens that each row emitted.
            drafts, kinds: [rows] that were verified (None: those chosen last).
        """
        moved = self.acceptance.align(req_ids)
        if moved is not None:
            self._drafts = reordered(self._drafts, moved)
        if kinds is not None:
            self.acceptance.kinds = kinds
        self._paid = False
        verified = np.where(emitted > 0, self._drafts if drafts is None else drafts, 0)
        if verified.any():
            self.acceptance.learn(verified, emitted - 1)
            self._tried |= set(self.acceptance.kinds[verified > 0].tolist())
            self._paid = self.state is State.EXPLORING and emitted[emitted > 0].mean() > self._cost

    def choose(self, allowed: np.ndarray, emitting: int, kinds: np.ndarray) -> np.ndarray:
        """Drafts of each row for the next step: [rows], at most `allowed`.

        Args:
            allowed: [rows] drafts that each may make.
            emitting: number of rows that continue decoding.
            kinds: [rows] kind of each row's drafts, 0 and up; bool for two.
        """
        self._steps += 1
        self.acceptance.kinds = kinds.astype(np.int64)
        self.gain, self._free = 1.0, bool(allowed.any())
        self._drafts = self._choose(allowed, emitting) if self._free else allowed
        self.suppressed = int((allowed - self._drafts).sum())
        return self._drafts

    def _choose(self, allowed: np.ndarray, emitting: int) -> np.ndarray:
        best = self._best(allowed, emitting)
        paused = self.state in (State.OFF, State.EXPLORING)
        if best.gain >= (STARTS if paused else 1.0):
            known = self._tried.issuperset(self.acceptance.kinds.tolist())
            self.state, self._wait = State.DRAFTING if known else State.WARMUP, self.first_wait
            self.gain = best.gain
            if paused:
                self._explored = self._steps
            if self._steps - self._explored >= EXPLORE_LONGER:
                self._explored, self.gain = self._steps, np.inf
                return np.minimum(best.allowed, self._more_than(best.number))
            return best.drafts
        self._cost = best.cost
        if not paused:
            self.state, self._explored = State.OFF, self._steps
        if not self._paid and self._steps < self._explored + self._wait:
            self.state = State.OFF
            return np.zeros_like(allowed)
        if not self._paid:
            self.acceptance.decay()
            self._wait = min(2 * self._wait, max(2 * self.first_wait, int((self._cost - 1) / self.explored)))
        self.state, self._explored, self.gain = State.EXPLORING, self._steps, np.inf
        return np.minimum(best.allowed, best.number)

    def _more_than(self, number: int) -> int:
        """The next larger number of drafts that a step may have."""
        if self.counts is None:
            return number + 1
        return min((count for count in self.counts if count > number), default=number)

    def _best(self, allowed: np.ndarray, emitting: int) -> Choice:
        """The choice of the highest expected speed-up."""
        relative, accepted = self.costs.relative(emitting), self.acceptance.probabilities()
        accepted = np.where(np.arange(self.costs.most) < allowed[:, None], accepted, 0)
        if self.counts is None:
            counts = np.arange(1, int(allowed.max()) + 1)
            # A step costs the same however many requests draft, so a draft must gain half of its share.
            floor = (relative[counts] - 1) / (2 * counts)  # [n]
        else:
            counts = np.array(self.counts)
            floor = np.zeros(len(counts))
        pays = (accepted[None] >= floor[:, None, None]) & (accepted[None] > 0)
        pays &= np.arange(self.costs.most) < counts[:, None, None]  # [n, rows, N]
        gains = (emitting + (accepted * pays).sum(axis=(1, 2))) / (emitting * relative[counts])
        best = int(np.argmax(gains))
        drafts, cost = pays[best].sum(axis=1), float(relative[counts[best]])
        return Choice(int(counts[best]), float(gains[best]), cost, allowed, drafts)
