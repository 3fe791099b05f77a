# SPDX-License-Identifier: Apache-2.0
"""What trials in pauses may lose, whatever it is lost by.

When a trial is due follows from what it should cost. What it did cost is known after it: its steps, less the tokens
that they brought in, and what the requests had to be given before it. That is paid back by the steps that go by, a
SHARE of each, before another trial may begin.
"""

from __future__ import annotations

import math

SHARE = 1 / 256  # of each step
SAVED = 1.0  # steps without drafts that may be lost at once, after as long without a trial as saves them
MOST_OWED = 3.0  # of which a dear trial costs no more: texts change


class TrialBudget:
    """Given the same, it decides the same. All is in units of a step without drafts."""

    def __init__(self) -> None:
        self._left, self._step = SAVED, 0

    def lost(self, steps: float, now: int) -> None:
        """A trial took so much longer than its tokens would have taken; less than 0 where it paid.

        Args:
            steps: as many steps without drafts.
            now: number of the step.
        """
        self._left = max(self._at(now) - steps, -MOST_OWED)
        self._step = now

    def next_trial(self, now: int) -> int:
        """The step before which no trial may begin."""
        return now + max(math.ceil(-self._at(now) / SHARE), 0)

    def _at(self, now: int) -> float:
        return min(self._left + (now - self._step) * SHARE, SAVED)
