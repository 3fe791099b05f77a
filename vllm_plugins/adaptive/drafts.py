# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay: decided from the acceptance and the seconds that this engine measures while it serves.

With s_i the probability that a request's first i drafts are accepted and c(n) the seconds of a step with n drafts, a
batch of B requests gives (B + sum over requests of s_1 + ... + s_n) / c(n) tokens a second. The n that maximises this
is taken; n = 0, vLLM's own step, is one of them. Requests of which too little is accepted get fewer drafts than others.

What is not done cannot be measured, so it is done now and then: steps without drafts while drafting, some with drafts
while not, one with a draft more than usual. Each takes a PROBE_EVERY-th of the time at most: the cheaper drafts are,
the more often a pause is broken, and the less they win, the more often steps without them are timed. A pause that was
broken in vain many times on end is broken more seldom: where drafts pay for some of the requests, some of the probes
are not in vain. No pause is broken before the steps that went by have paid for what the probes before have lost
(trial_budget.py). Where what is known leaves it open whether drafts pay, or whether another number would pay more, it
is measured as SOON as may be. Steps that draft after a pause are repeated at once only while what was accepted pays
for it. The first steps after others of another sort are not timed: what they run is in no cache then, and seconds of
such steps alone would keep a pause going for ever, or drafting that does not pay.

In a pause a method may leave out what only drafts need, and always where prompts are taken in, as nobody knows yet
whether their requests' drafts pay. It is made up for before the next trial, or where drafts promise to pay, and never
where that is dear and the pause one that lasts: it began with drafts that are clearly too dear, a trial in it has
failed, or it is LONG_PAUSE steps old.
"""

from __future__ import annotations

import math

import numpy as np

from vllm_ppd.vllm_plugins.adaptive.draft_acceptance import BELIEF, DraftAcceptance, reordered
from vllm_ppd.vllm_plugins.adaptive.step_costs import ENOUGH, SIZES, Agree, StepCosts
from vllm_ppd.vllm_plugins.adaptive.trial_budget import TrialBudget

PROBE_EVERY = 128  # steps: 0.8 % of them
SHORTEST_PAUSE = 16  # steps, however cheap drafts are
LONG_PAUSE = 64  # steps
TURNS = 4  # times as often is a pause broken that the requests at hand alone have brought about
SETTLING = 3  # steps without drafts that are not timed after others; of steps with drafts, one
CLEAR = 1.25  # speed-up where a few per cent decide nothing: one step without drafts is enough to tell
FAILURES = 4  # probes in vain that make the pauses between them twice as long, twice as many three times, ...
MOST_PATIENCE = 4  # times
BURST = 2  # steps of a probe with drafts: one that is not timed, and one that is
SOON = 16  # steps between those that measure what may well be other than it seems, and decides
LONGEST_NAP = 64  # steps
REFRESH_EVERY = 16  # steps between two looks at the clock
# Predicted speed-up from which on drafting begins, and below which it ends: a step's time is not known to a per cent.
WORTH, STAYS = 1.05, 1.02
DOUBT = 1.0  # standard deviations of steps' prices: what they may well be


class AdaptiveDrafts:
    """Chooses drafts step by step. Given the same steps and the same agreed seconds, it chooses the same.

    Args:
        most: most drafts of a request, N.
        agree: see StepCosts.
        kinds, belief: see DraftAcceptance.
    """

    def __init__(self, most: int, agree: Agree | None = None, kinds: int = 2, belief: float = BELIEF) -> None:
        self.most = most
        self.acceptance = DraftAcceptance(most, kinds, belief)
        self.costs = StepCosts(most, agree)
        self.trials = TrialBudget()
        self.probing = False  # whether the last choice was made to measure
        self.withheld = 0  # drafts that the last choice left out
        self.gain = 1.0  # speed-up that the last choice promises; infinite where it is made to measure
        # Speed-up by drafts that are not made to measure, once requests have what it takes; None: they do not pay.
        self.promised: float | None = np.inf
        self.resting = False  # whether nothing that only drafts need has to be computed in the step that runs now
        self.lasting = False  # nor, if that costs much, later on
        self._drafts = np.zeros(0, dtype=np.int64)  # [rows] chosen for the step that runs now
        self._steps = self._last_drafted = self._last_other = 0
        self._last_without = [0] * len(SIZES)  # by batch size, the latest step without drafts
        self._pausing = False  # drafts do not pay
        self._paused_at = 0  # the step at which they were found not to
        self._resumed_at = 0  # the step at which they were found to, again
        self._clearly = False  # whether they were found to be far from paying then
        self._idle = False  # nobody may draft, whatever pays
        self._changed = False  # requests came or went, or their drafts are of other kinds
        self._paid = False  # the step that ended was a probe in a pause, and paid for itself
        self._price = 1.0  # seconds of the pause's latest probe, in units of a step without drafts
        self._burst = 0  # steps that the probe goes on for
        self._failed = 0  # probes on end that did not pay
        self._kinds: frozenset[int] = frozenset()  # of drafts that the requests at hand might make
        self._drafted: bool | None = None  # whether the step before the next one drafts; None: it takes a prompt in
        self._alike = 0  # steps before that one of its sort, on end
        self._settling = 1  # steps without drafts that are not timed now: at first few are on end between prompts
        self._now = 0.0
        self._timed: tuple[int, int, float] | None = None  # batch size, drafts and start of the step that runs now
        self._size = 0  # batch size of the last choice
        self._wake = 0  # the step before which nothing but other requests can end a pause

    def sleeps_on(self, now: float, own: float = 1.0) -> bool:
        """Whether nobody drafts after this step, either: in place of observe and choose, which would say so slowly.

        Args:
            now, own: as for observe, after a step of decoding by the requests of the last choice.
        """
        if self._steps + 1 >= self._next_look():
            return False
        self.slept(1, now, own)
        return True

    def nap(self) -> int:
        """Steps after which nobody drafts, whatever the requests at hand say: slept may be called after the last."""
        # The steps after drafts, which these are compared with, are timed one by one.
        if self._alike < self._settling + ENOUGH:
            return 0
        return min(max(self._next_look() - 1 - self._steps, 0), LONGEST_NAP)

    def slept(self, steps: int, now: float | None, own: float = 1.0) -> None:
        """In place of observe and choose after each of some steps on end, all of decoding by the same requests.

        Args:
            steps: how many.
            now, own: as for observe, after the last of them; now is None if that is not known.
        """
        if self._timed is not None and now is not None:
            self.costs.add(self._size, 0, (now - self._timed[2]) * own / steps, steps)
        self._now = self._now if now is None else now
        self._begin_step(steps)
        self._alike += steps - 1
        self._end_choice(0, timed=now is not None)

    def _next_look(self) -> int:
        """The step from which on more than the requests at hand can end a pause."""
        # Kinds that are not drafted are looked at then.
        return min(self._wake, self._steps + PROBE_EVERY - self._steps % PROBE_EVERY)

    def observe(
        self,
        req_ids: list[str],
        emitted: np.ndarray,
        now: float,
        decoding: bool,
        own: float = 1.0,
    ) -> None:
        """Learn from the step that ended.

        Args:
            req_ids: of the batch rows.
            emitted: [rows] tokens that each row emitted.
            now: seconds on a clock, at the same point of every step.
            decoding: whether every row took its last token and its drafts in, and no prompt.
            own: what the step would take without anything that only drafts need, in units of its time.
        """
        moved = self.acceptance.align(req_ids)
        if moved is not None:
            self._drafts, self._changed = reordered(self._drafts, moved), True
        self._paid = False
        if self._timed is not None and decoding:
            size, drafts, started = self._timed
            self.costs.add(size, drafts, (now - started) * (1.0 if drafts else own))
        self._timed = None
        if not decoding:
            self._drafted = None
        if self._drafts.any():
            verified = np.where(emitted > 0, self._drafts, 0)
            self.acceptance.learn(verified, emitted - 1, self._steps)
            if self._pausing and self.probing and verified.any():
                self._paid = bool(emitted[verified > 0].mean() > max(self._price, 1.0))
                self._failed *= not self._paid
                self.trials.lost(self._price - emitted[emitted > 0].mean(), self._steps)
        self._now = now

    def choose(
        self,
        allowed: np.ndarray,
        emitting: int,
        kinds: np.ndarray,
        fixed: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> np.ndarray:
        """Drafts of each row for the next step.

        Args:
            allowed: [rows] drafts that each may make.
            emitting: rows that go on decoding.
            kinds: [rows] of what each might draft, 0 and up; bool will do for two.
            fixed: [rows] bool, requests whose drafts must not depend on measurements: they make what they may.
            wanted: [rows] drafts that each might make once it has what it takes (None: as allowed).

        Returns:
            [rows] at most `allowed`.
        """
        self._begin_step()
        before, size = self._size, self.costs.size(emitting)
        self._size = size
        free = np.where(fixed, 0, allowed)
        self.probing, self.gain = False, 1.0
        # What did not pay for other kinds may pay for these.
        self._changed |= self.acceptance.set_kinds(kinds)
        present = frozenset(kinds.tolist())
        if not present <= self._kinds:
            self._failed = 0
        self._kinds = present
        if self._steps % PROBE_EVERY == 0 and self._steps - self._last_drafted < PROBE_EVERY:
            # Where others are drafted all the time, no pause ends in which a kind that did not pay is tried again.
            self.acceptance.fade_idle(self._steps - PROBE_EVERY)
        drafts = self._choose(free, size, emitting) if free.any() else free
        relative = self.costs.relative(size)
        if self._pausing and (self._changed or wanted is None):
            # To make up for what they lack has its price, and who is about to end may not bring it in. What nobody has
            # tried is worth it once: a trial that pays for itself may come after those who wait for it have ended.
            least = CLEAR if self.acceptance.tried else WORTH
            self.promised = self._promise(wanted, size, emitting, DOUBT, least)
        elif self._changed and not free.any() and relative is not None:
            self.promised = self._promise(wanted, size, emitting, 0.0, STAYS)
        self.withheld = int((free - drafts).sum())
        drafts = np.where(fixed, allowed, drafts)
        self._drafts, changed = drafts, self._changed
        # Requests whose prompts are taken in have not been asked yet.
        self._changed = changed and not (allowed.any() or (wanted is not None and wanted.any()))
        self._idle = not allowed.any()
        # Drafts of fixed requests are in every step: its time says nothing of the others'.
        self._end_choice(int(drafts.max(initial=0)), timed=not fixed.any())
        if not allowed.any():
            # To find out what each lacks takes as long as many steps of a pause do.
            self._wake = self._steps + (LONG_PAUSE if self.promised is None else SHORTEST_PAUSE)
        elif not self._pausing or relative is None or self._drafted or self._burst or fixed.any():
            self._wake = 0
        elif self.promised is not None:
            self._wake = self._steps + SHORTEST_PAUSE
        elif changed or self._steps >= self._wake or size != before:
            # What is known of other requests hardly changes in a pause, and a look takes a tenth of a small step.
            again = max(self._ends_at(relative, TURNS), self._steps + LONG_PAUSE)
            self._wake = max(min(self._ends_at(relative), again), self.trials.next_trial(self._steps))
        return drafts

    def _begin_step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps % REFRESH_EVERY < steps or self.costs.due:
            self.costs.refresh()

    def _end_choice(self, chosen: int, timed: bool) -> None:
        """Note what the step that runs now is, in which requests make up to so many drafts."""
        if chosen == 0:
            self._last_without[self._size] = self._steps
        else:
            self._last_drafted = self._steps
        tried = self._last_drafted > self._paused_at or self._steps - self._paused_at >= LONG_PAUSE
        self.resting = chosen == 0 and (self._pausing or self._idle)
        self.lasting = self.resting and self._pausing and (tried or self._clearly)
        self._alike = self._alike + 1 if self._drafted == (chosen > 0) else 0
        settled = self._alike >= (1 if chosen else self._settling)
        self._timed = (self._size, chosen, self._now) if settled and timed else None
        self._drafted = chosen > 0

    def _ends_at(self, relative: np.ndarray, times: int = 1) -> int:
        """The step that breaks a pause which began after the latest drafts, if it is broken so many times as often."""
        price = max(relative[1], self._price)
        patience = min(1 + self._failed / FAILURES, MOST_PATIENCE)
        steps = max(SHORTEST_PAUSE, PROBE_EVERY * (price - 1) * patience / times)  # for each that a probe takes
        return self._last_drafted + math.ceil(BURST * steps)

    def outlook(self, allowed: np.ndarray, emitting: int, kinds: np.ndarray) -> float:
        """The speed-up that choose would promise; 1 in a pause, and as long as nothing is known."""
        relative = self.costs.relative(self.costs.size(emitting))
        if relative is None or self._pausing or not allowed.any():
            return 1.0
        self._changed |= self.acceptance.set_kinds(kinds)
        return self._best(allowed, relative, emitting)[1]

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    @property
    def drafting(self) -> bool:
        """Whether the step that runs now has drafts."""
        return bool(self._drafts.any())

    def interrupted(self, seconds: float = 0.0) -> None:
        """The step that runs now does not begin where the last one ended: what it takes is not to be learned from.

        Args:
            seconds: that its drafts' requests took before it; the same on every rank.
        """
        self._timed = None
        plain = self.costs.plain(self._drafts.size)
        if seconds and plain and self._pausing and self.probing:
            self.trials.lost(seconds / plain, self._steps)

    def pass_over(self) -> None:
        """The next step's drafts are another's: in place of choose, or after it to take its drafts back."""
        self._drafts = np.zeros_like(self._drafts)
        self._timed = self._drafted = None
        self.probing = self.resting = self.lasting = False
        self._wake = 0
        self.withheld = 0

    def _promise(self, wanted: np.ndarray | None, size: int, emitting: int, doubt: float, least: float) -> float | None:
        """Speed-up by drafts that requests might make, where steps are known; None where it is less than the least."""
        if wanted is None or not wanted.any() or self.costs.relative(size) is None:
            return None
        gain = self._best(wanted, self._relative(size, doubt), emitting)[1]
        return gain if gain >= least else None

    def _choose(self, allowed: np.ndarray, size: int, emitting: int) -> np.ndarray:
        """As choose, for the requests whose drafts may depend on measurements."""
        relative = self.costs.relative(size)
        if relative is None:
            # Nothing is known yet: time some steps without drafts, then some with.
            if not self.costs.knows(size, 0):
                return np.zeros_like(allowed)
            self.gain = np.inf
            return allowed
        due = going_on = False
        if self._pausing:
            may_try = self._steps >= self.trials.next_trial(self._steps)
            due = may_try and self._steps >= self._ends_at(relative)
            if may_try and not due and self._steps >= max(self._wake, self._ends_at(relative, TURNS)):
                # Where drafts pay for others, what these requests say now has taken a bad turn, which may not last.
                due = self._best(allowed, relative, emitting, own=0.0)[1] >= WORTH
            going_on = self._goes_on()
            if not (due or going_on or self._paid or self._changed or self.promised is not None):
                return np.zeros_like(allowed)
            if due:
                # The text may have become another.
                self.acceptance.fade()
                self._failed += 1
        best, gain, drafts = self._best(allowed, relative, emitting)
        if gain >= (WORTH if self._pausing else STAYS):
            if self._pausing:
                self._pausing, self._resumed_at, self._failed = False, self._steps, 0
            self.gain = self.promised = gain
            return self._or_probe(allowed, drafts, best, size, emitting)
        if not self._pausing:
            self._pausing, self._paused_at, self._burst = True, self._steps, 0
            self._settling, self._price, self.promised = SETTLING, 1.0, None
            self._clearly = gain < 1 / WORTH
        if due or going_on or self._paid:
            if due:
                self._burst = BURST - 1
            hoped, gain, _ = self._best(allowed, self._relative(size, -DOUBT), emitting)
            if gain < WORTH:
                hoped = best
            self._price = float(relative[hoped])
            return self._probe(np.minimum(allowed, hoped))
        return np.zeros_like(allowed)

    def _or_probe(self, allowed: np.ndarray, drafts: np.ndarray, best: int, size: int, emitting: int) -> np.ndarray:
        """The drafts that pay, or a step that measures another number."""
        if self._drafted is False and self._goes_on():
            return self._probe(np.zeros_like(allowed))
        since = self._steps - max(self._last_without[size], self._resumed_at)
        if since >= SOON and since % SOON == 0:
            unsure = self.gain < CLEAR
            # What was timed a few times only may be of a moment in which the machine became faster or slower.
            doubtful = not self.costs.knows(size, 0, times=3)
            doubtful = doubtful or self._best(allowed, self._relative(size, DOUBT), emitting)[1] < STAYS
            # What little is lost without drafts that hardly pay is lost the more often.
            if doubtful or since >= min(PROBE_EVERY, PROBE_EVERY * (SETTLING + ENOUGH) * (self.gain - 1)):
                self._settling = SETTLING if unsure else 1
                self._burst = self._settling + (ENOUGH if unsure or doubtful else 1) - 1
                return self._probe(np.zeros_like(allowed))
        since = self._steps - self._last_other
        if since >= SOON and since % SOON == 0:
            hoped, gain, others = self._best(allowed, self._relative(size, -DOUBT), emitting)
            if since >= PROBE_EVERY and hoped == best:
                gain, others = np.inf, np.minimum(allowed, best + 1)
            if gain > WORTH * self.gain and not np.array_equal(others, drafts):
                self._last_other = self._steps
                return self._probe(others)
        return drafts

    def _relative(self, size: int, doubt: float) -> np.ndarray:
        """As StepCosts.relative, where steps are known."""
        relative = self.costs.relative(size, doubt)
        assert relative is not None
        return relative

    def _goes_on(self) -> bool:
        """Whether the probe that was begun takes another step."""
        goes_on = self._burst > 0
        self._burst -= goes_on
        return goes_on

    def _probe(self, drafts: np.ndarray) -> np.ndarray:
        self.probing, self.gain = True, np.inf
        return drafts

    def _best(
        self, allowed: np.ndarray, relative: np.ndarray, emitting: int, own: float = 1.0
    ) -> tuple[int, float, np.ndarray]:
        """The number of drafts of the highest predicted speed-up: (n >= 1, speed-up, drafts [rows]).

        Args:
            allowed, emitting: as for choose.
            relative: seconds of steps with 0, 1, ... drafts.
            own: see DraftAcceptance.probabilities.
        """
        accepted = self.acceptance.probabilities(own)
        accepted[np.arange(self.most) >= allowed[:, None]] = 0
        counts = np.arange(1, int(allowed.max()) + 1)
        # A step's time is there however many requests draft: a draft must bring in half of its share.
        floor = (relative[counts] - 1) / (2 * counts)  # [n]
        worth = (accepted[None] >= floor[:, None, None]) & (accepted[None] > 0)
        worth &= np.arange(self.most) < counts[:, None, None]  # [n, rows, N]
        tokens = emitting + (accepted * worth).sum(axis=(1, 2))
        gains = tokens / (emitting * relative[counts])
        best = int(np.argmax(gains))
        return int(counts[best]), float(gains[best]), worth[best].sum(axis=1)
