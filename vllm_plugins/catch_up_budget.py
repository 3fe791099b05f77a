# SPDX-License-Identifier: Apache-2.0
"""Whose heads catch up, so that it takes no more than a share of the time.

What the heads missed can be computed at any time, and all of it at once would hold everybody up. So each step puts a
share of its time aside, which whoever has missed least may have. While drafts pay, or promise to, to catch up is an
investment, made of what they win. In a pause it is the price of a trial, and a trial by a few says little about what
drafts of all of them would take: it waits until half of the requests can be paid for. What a long pause puts aside is
not spent in one go: everybody would stand still for as long. Who drafts goes on where a step took another's prompt in,
over which the heads rested: a pass over its few tokens takes what they would have taken in the step.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from vllm_ppd.vllm_plugins.adaptive.drafts import PROBE_EVERY

INVESTED = 1 / 2  # of the time that drafts win, while they pay
MOST_INVESTED = 1 / 4  # of a step without drafts
OF_A_TRIAL = 1 / (2 * PROBE_EVERY)  # in a pause: the trial itself takes its share, too
MOST_WON = 64  # steps without drafts that are kept of what drafts have won, for requests that come later
MOST_AT_ONCE = 4  # steps without drafts that a pause puts aside


class CatchUpBudget:
    """Seconds that are put aside, and what a token took lately; given the same, it decides the same.

    Args:
        step_tokens: most tokens of a request in a step of decoding: as many nobody waits for who drafts.
    """

    def __init__(self, step_tokens: int) -> None:
        self.seconds = 0.0
        self._step_tokens = step_tokens
        self._prices: deque[float] = deque(maxlen=9)  # seconds of a token
        self._step = 0  # at which the seconds were counted last

    def affordable(self, missing: np.ndarray, step: int, plain: float, promised: float | None) -> np.ndarray:
        """Rows that can draft, perhaps once they have caught up.

        Args:
            missing: [rows] tokens that the heads have not seen.
            step: number of the step that ended.
            plain: seconds of a step without drafts; 0 where that is not known.
            promised: speed-up by drafts; None where they do not pay.

        Returns:
            [rows] bool.
        """
        steps, self._step = step - self._step, step
        whole = missing == 0
        if promised is None:
            if whole.all():
                return whole
            self.seconds = min(self.seconds + steps * plain * OF_A_TRIAL, MOST_AT_ONCE * plain)
        else:
            won = steps * plain * min(INVESTED * (promised - 1), MOST_INVESTED)
            self.seconds = min(self.seconds + won, MOST_WON * plain)
            if whole.all() or not plain:
                return np.ones(len(missing), dtype=bool)
        order = np.argsort(missing, kind="stable")
        if self._prices:
            paid = np.cumsum(missing[order]) * min(self._prices) <= self.seconds
        else:
            paid = np.arange(len(order)) <= np.count_nonzero(whole)  # one more: what it takes is to be known
        chosen = whole.copy() if promised is None else missing <= self._step_tokens
        chosen[order[paid]] = True
        return whole if promised is None and self._prices and 2 * np.count_nonzero(chosen) < len(missing) else chosen

    def spent(self, missing: np.ndarray, seconds: float) -> None:
        """To catch up with so many tokens of each request [requests] took so long."""
        if not (missing > self._step_tokens).any():  # as if the heads had run in the step
            return
        self._prices.append(seconds / int(missing.sum()))
        self.seconds = max(self.seconds - seconds, 0.0)  # one that took longer than others may have had to be compiled
