# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs by batch size and drafts, as this engine measures it while it serves.

Kinds of steps are seldom timed in the same minute, and a machine is not as fast in one as in the next: all seconds are
held against how fast steps of known kinds are now.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

import numpy as np

# Batch sizes that are told apart: each stands for those from the one before it up to itself.
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
KEPT = 9  # latest steps of a kind whose median counts
ENOUGH = 3  # steps of a kind from which on its median is believed
CHANGED = 1.3  # times as long or as short in each of the ENOUGH latest steps: those before them no longer count
PACE_MEMORY = 32  # steps that say how fast the machine is now
MOST_SURPRISE = 0.3  # that a single step counts for, which may be late for reasons of its own

Agree = Callable[[np.ndarray], np.ndarray]


class _Kind:
    """Steps of a batch size and a number of drafts."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=KEPT)  # seconds
        self.when: deque[int] = deque(maxlen=KEPT)  # of all steps that were added, which these were
        self.count = 0
        self.median = math.nan

    def tell(self) -> float:
        """The median of the latest; of the very latest alone where each of them says that such a step is another."""
        self.median = statistics.median(self.latest)
        newest = list(self.latest)[-ENOUGH:]
        if max(newest) < self.median / CHANGED or min(newest) > self.median * CHANGED:
            self.median = statistics.median(newest)
        return self.median


class StepCosts:
    """Medians of the latest steps' seconds, by batch size and most drafts of a request in the step.

    Args:
        most: most drafts of a request.
        agree: makes of this rank's seconds [sizes, most + 1] those that all ranks decide by, as ranks measure
            differently and must draft alike. It is called where every rank calls it (None: there is one rank).
    """

    def __init__(self, most: int, agree: Agree | None = None) -> None:
        self.agree = agree
        # Not in arrays: their entries take five times as long, cold, and a step adds one.
        self._kinds = [[_Kind() for _ in range(most + 1)] for _ in SIZES]
        self._added = 0
        self._changed: set[tuple[int, int]] = set()
        self.due = False  # whether a kind of step can be told for the first time
        self._medians = np.full((len(SIZES), most + 1), np.nan)
        # Steps that each is of, and the median of when they were; the same on every rank.
        self._kept, self._timed_at = np.zeros(self._medians.shape), np.zeros(self._medians.shape)
        self._agreed = self._medians.copy()
        self._pace = 0.0  # log of how much longer steps take now than those that the medians are of
        self._relative: dict[int, np.ndarray | None] = {}

    @staticmethod
    def size(requests: int) -> int:
        """The row of a batch of so many requests."""
        return min(int(np.searchsorted(SIZES, requests)), len(SIZES) - 1)

    def add(self, size: int, drafts: int, seconds: float) -> None:
        """A step took so long."""
        kind = self._kinds[size][drafts]
        if kind.median > 0 and seconds > 0:
            surprise = math.log(seconds / kind.median) - self._pace
            self._pace += min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE) / PACE_MEMORY
        kind.latest.append(seconds * math.exp(-self._pace))
        kind.when.append(self._added)
        kind.count += 1
        self._added += 1
        self._changed.add((size, drafts))
        self.due |= kind.count == ENOUGH

    def count(self, size: int, drafts: int) -> int:
        """Steps of a kind seen so far; the same on every rank."""
        return self._kinds[size][drafts].count

    def plain(self, requests: int) -> float:
        """Seconds of a step without drafts; 0 where none was timed."""
        seconds = float(self._agreed[self.size(requests), 0])
        return seconds if seconds > 0 else 0.0

    def refresh(self) -> None:
        """Take the steps since the last refresh into account, on all ranks at once."""
        for cell in self._changed:
            kind = self._kinds[cell[0]][cell[1]]
            if kind.count >= ENOUGH:
                self._medians[cell] = kind.tell()
                self._kept[cell], self._timed_at[cell] = len(kind.when), statistics.median(kind.when)
        self._changed.clear()
        self.due = False
        self._agreed = self._medians.copy() if self.agree is None else self.agree(self._medians)
        self._relative.clear()

    def relative(self, size: int) -> np.ndarray | None:
        """Seconds of steps with 0, 1, ... most drafts in units of a step without any: [most + 1], ascending from 1.

        Drafts that were never timed lie on the line through those that were; a batch size that was not timed takes the
        ratios of the nearest one that was. None if there is none such.
        """
        if size not in self._relative:
            timed = np.isfinite(self._agreed)
            usable = np.flatnonzero(timed[:, 0] & timed[:, 1:].any(axis=1))
            if len(usable):
                nearest = usable[np.argmin(abs(usable - size))]
                kinds = np.flatnonzero(timed[nearest])
                believed = np.lexsort((-self._timed_at[nearest, kinds[1:]], -self._kept[nearest, kinds[1:]]))
                self._relative[size] = _line(self._agreed[nearest], kinds, 1 + believed)
            else:
                self._relative[size] = None
        return self._relative[size]


def _line(seconds: np.ndarray, timed: np.ndarray, believed: np.ndarray) -> np.ndarray:
    """[most + 1] relative to the first, between and beyond those that were timed on a straight line.

    More drafts never take less time. Where they seem to, what was timed more often is right, the first steps of a kind
    being slow where they have to be compiled, and of what was as often what was timed latest: kinds that are not
    drafted any more keep the seconds that they once took. `believed` has places in `timed` in this order.
    """
    ratios = np.full(len(timed), np.nan)
    ratios[0] = 1.0
    for kind in believed:
        low, high = np.fmax.reduce(ratios[:kind]), np.fmin.reduce(ratios[kind + 1 :], initial=np.inf)
        ratios[kind] = min(max(seconds[timed[kind]] / seconds[0], low), high)
    found = np.interp(np.arange(len(seconds)), timed, ratios)
    before, last = timed[-2:]
    beyond = np.arange(last + 1, len(seconds))
    found[beyond] += (beyond - last) * (found[last] - found[before]) / (last - before)
    return found
