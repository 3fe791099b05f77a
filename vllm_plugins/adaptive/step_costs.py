# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs by batch size and drafts, as this engine measures it while it serves.

A machine is not as fast in one minute as in the next, so two kinds of steps can be compared only where they were timed
close to each other. A Kalman filter of each batch size does so. In logs, a step's seconds are the machine's pace, plus
the price of the step's drafts, plus noise; the pace may change from any step to the next, and more where the number of
drafts does, and prices drift slowly. While all steps have as many drafts, pace and price cannot be told apart; steps
around a change of that number show what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# Batch sizes that are told apart: each stands for those from the one before it up to itself.
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
FIRST = 2  # steps of a kind that are not timed: something may have to be compiled in them
ENOUGH = 3  # timed ones from which on they are believed
# Standard deviations of logs of seconds.
NOISE = 0.04  # of one step
PACE = 0.03  # of the machine from one step to the next
AFRESH = 0.05  # and once more where the number of drafts changes: a machine is not equally fast at each of two kinds
AT_ALL, EACH, BEND = 0.3, 0.1, 0.05  # of prices before any is known: of drafts at all, of each, of how these differ
OTHER_AT_ALL, OTHER_EACH, OTHER_BEND = 0.1, 0.05, 0.05  # of the same from one batch size to the next
DRIFT = 0.005  # of prices from one step to the next, in units of what they are before any is known
SURPRISE = 2.0  # in standard deviations: no step counts for more, as it may be late for reasons of its own
CHANGED = 3  # surprises on end: these steps are not what they were

Agree = Callable[[np.ndarray], np.ndarray]


class _Prices:
    """The filter of one batch size.

    Args:
        prior: covariance of the prices before any is known, [1 + N, 1 + N]; that of the pace, in the first row and
            column, is zero.
        nearest: of the nearest batch size (None: there is none).
        apart: covariance of how the prices of the two differ, as the prior.
    """

    def __init__(self, prior: np.ndarray, nearest: _Prices | None, apart: np.ndarray) -> None:
        self.prior = prior
        self.mean, self.covariance = np.zeros(len(prior)), prior.copy()  # [1 + N]: pace, price of 1, 2, ... drafts
        if nearest is not None:
            self.mean[1:] = nearest.mean[1:]
            self.covariance[1:, 1:] = nearest.covariance[1:, 1:] + apart[1:, 1:]
        self._latest: int | None = None  # number of the latest step
        self._drafts, self._alike = 0, 0  # its drafts, and steps before it of as many, on end
        # On end, below 0 where steps took less: by drafts, of the first step of each time; and of other steps.
        self._surprises = [0] * (len(prior) + 1)

    def take(self, drafts: int, seconds: float, number: int) -> None:
        """The step of this number had so many drafts and took so long."""
        mean, covariance, log = self.mean, self.covariance, math.log(seconds)
        if self._latest is None:
            mean[0], covariance[0, 0] = log, 1.0
        else:
            since = number - self._latest
            # What is known is forgotten, no further than to what was known at first.
            covariance += (1 - math.exp(-(DRIFT**2) * since)) * (self.prior - covariance)
            covariance[0, 0] += PACE**2 * since + (AFRESH**2 if drafts != self._drafts else 0.0)
        self._alike = self._alike + 1 if drafts == self._drafts else 0
        self._latest, self._drafts = number, drafts
        innovation = log - mean[0] - (mean[drafts] if drafts else 0.0)
        most = SURPRISE * math.sqrt(self._variance(drafts))
        if not self._has_changed(drafts, innovation, most) and abs(innovation) > most:
            innovation = math.copysign(most, innovation)
        covaries = covariance[0] + covariance[drafts] if drafts else covariance[0].copy()
        variance = self._variance(drafts)
        mean += covaries / variance * innovation
        covariance -= np.outer(covaries, covaries) / variance

    def _variance(self, drafts: int) -> float:
        """Of what such a step takes."""
        of = self.covariance
        of_price = of[drafts, drafts] + 2 * of[0, drafts] if drafts else 0.0
        return float(of[0, 0] + of_price) + NOISE**2

    def _has_changed(self, drafts: int, innovation: float, most: float) -> bool:
        """Take note of whether a step is a surprise, and of how many on end; whether what they speak of has changed.

        Steps beside each other are late for one reason. So what drafts cost has changed only where it is a surprise
        each time that they begin, or end.
        """
        first = self._alike == 0
        if first:
            self._surprises[-1] = 0
        of = drafts if first else -1
        sign = int(math.copysign(1, innovation)) if abs(innovation) > most else 0
        before = self._surprises[of]
        self._surprises[of] = sign + (before if before * sign > 0 else 0)
        if abs(self._surprises[of]) < CHANGED:
            return False
        self._surprises[of] = 0
        self.covariance[0, 0] += innovation**2
        if first:
            self.covariance += (innovation / AT_ALL) ** 2 * self.prior
        return True


class StepCosts:
    """Seconds of steps by batch size and most drafts of a request in the step.

    Args:
        most: most drafts of a request, N.
        agree: makes of this rank's numbers [2, sizes, 1 + N] those that all ranks decide by, as ranks measure
            differently and must draft alike. It is called where every rank calls it (None: there is one rank).
    """

    def __init__(self, most: int, agree: Agree | None = None) -> None:
        self.agree = agree
        self._prior = _covariance(most, AT_ALL, EACH, BEND)
        self._apart = _covariance(most, OTHER_AT_ALL, OTHER_EACH, OTHER_BEND)
        self._prices: dict[int, _Prices] = {}
        # Not in arrays: their entries take five times as long, cold, and a step adds one.
        self._seen = [[0] * (1 + most) for _ in SIZES]
        self._added = 0
        self._waiting: list[tuple[int, int, float, int]] = []
        self.due = False  # whether a kind of step can be told for the first time
        # Pace and prices, and their standard deviations; NaN where they are not known.
        self._agreed = np.full((2, len(SIZES), 1 + most), np.nan)
        self._relative: dict[tuple[int, float], np.ndarray | None] = {}

    @staticmethod
    def size(requests: int) -> int:
        """The row of a batch of so many requests."""
        return min(int(np.searchsorted(SIZES, requests)), len(SIZES) - 1)

    def add(self, size: int, drafts: int, seconds: float, steps: int = 1) -> None:
        """A step took so long, or some on end on average."""
        self._added += steps
        seen = self._seen[size][drafts] = self._seen[size][drafts] + 1
        if seen > FIRST:
            self._waiting.append((size, drafts, seconds, self._added))
            self.due |= seen == FIRST + ENOUGH

    def knows(self, size: int, drafts: int, times: int = 1) -> bool:
        """Whether enough steps of a kind were timed, so many times over; the same on every rank."""
        return self._seen[size][drafts] >= FIRST + times * ENOUGH

    def plain(self, requests: int) -> float:
        """Seconds of a step without drafts, of the nearest batch size that was timed; 0 where none was."""
        logs, size = self._agreed[0, :, 0], self.size(requests)
        timed = np.flatnonzero(np.isfinite(logs))
        return math.exp(logs[timed[np.argmin(abs(timed - size))]]) if len(timed) else 0.0

    def refresh(self) -> None:
        """Take the steps since the last refresh into account, on all ranks at once."""
        for size, drafts, seconds, number in self._waiting:
            if size not in self._prices:
                nearest = min(self._prices, key=lambda other: abs(other - size), default=size)
                apart = self._apart * (nearest - size) ** 2
                self._prices[size] = _Prices(self._prior, self._prices.get(nearest), apart)
            self._prices[size].take(drafts, max(seconds, 1e-9), number)
        self._waiting.clear()
        self.due = False
        found = np.full_like(self._agreed, np.nan)
        for size, prices in self._prices.items():
            if self.knows(size, 0):
                drafted = any(self.knows(size, drafts) for drafts in range(1, len(self._prior)))
                known = slice(None) if drafted else slice(1)
                variances = np.maximum(prices.covariance.diagonal(), 0.0)  # rounding may leave less than nothing
                found[:, size, known] = prices.mean[known], np.sqrt(variances[known])
        self._agreed = found if self.agree is None else self.agree(found)
        self._relative.clear()

    def relative(self, size: int, doubt: float = 0.0) -> np.ndarray | None:
        """Seconds of steps with 0, 1, ... most drafts in units of a step without any: [1 + N], of 1 and more.

        A batch size that was not timed takes the ratios of the nearest one that was. None if there is none such.

        Args:
            doubt: standard deviations by which prices are more than they seem to be, or less.
        """
        if (size, doubt) not in self._relative:
            usable = np.flatnonzero(np.isfinite(self._agreed[0, :, 1]))
            ratios = None
            if len(usable):
                nearest = usable[np.argmin(abs(usable - size))]
                prices, deviations = self._agreed[:, nearest, 1:]
                apart = np.sqrt(self._apart.diagonal()[1:]) * abs(nearest - size)
                # More drafts may take less time: how fast products are follows no line in their rows.
                ratios = np.exp(np.append(0.0, np.maximum(prices + doubt * np.hypot(deviations, apart), 0.0)))
            self._relative[size, doubt] = ratios
        return self._relative[size, doubt]


def _covariance(most: int, at_all: float, each: float, bend: float) -> np.ndarray:
    """Of a line and a random walk about it: [1 + N, 1 + N]; what was not timed lies on the line through what was."""
    drafts = np.arange(1, most + 1)
    found = np.zeros((1 + most, 1 + most))
    line = at_all**2 + each**2 * np.outer(drafts, drafts)
    found[1:, 1:] = line + bend**2 * np.minimum.outer(drafts, drafts)
    return found
