# SPDX-License-Identifier: Apache-2.0
"""When heads are learned from the traffic: the scheduler orders what the workers do.

The workers of all tensor-parallel ranks compute the same slices in the same steps. The
first rank reports how far it is, and the scheduler's orders travel with a step.
"""

import logging
import math
from typing import NamedTuple

logger = logging.getLogger("vllm.vllm_ppd")

# Attribute that we add to a ModelRunnerOutput: a Report
LEARNED = "vllm_ppd_learned"
BLOCK = 64  # positions that are used at once
HELD = 4096  # positions that solutions are compared at
# Solutions are made from so many positions for each dimension of the states
MARKS = (8, 16, 32, 64, 128)
DEVIATIONS = 1.96  # of the mean gain, within which it is not sure
USELESS = 2  # solutions in succession without a sure gain, which end learning


class Report(NamedTuple):
    """How far the learning of the first rank is.

    Attributes:
        generation: grows when the target's weights change.
        seen: positions for learning so far.
        held: positions held out so far.
        solutions: finished and compared.
        accepted: drafts of the latest solution at the held-out positions.
        gained: those less the drafts of the heads in use.
        squares: the sum of the squares of this gain by position.
    """

    generation: int = 0
    seen: int = 0
    held: int = 0
    solutions: int = 0
    accepted: int = 0
    gained: int = 0
    squares: int = 0

    def gains(self) -> bool:
        """Whether the latest solution is better, beyond the 95 % interval."""
        mean = self.gained / HELD
        variance = self.squares / HELD - mean**2
        return mean > DEVIATIONS * math.sqrt(max(variance, 0.0) / HELD)


class Orders(NamedTuple):
    """What the workers do after a step.

    Attributes:
        generation: for which weights; workers whose weights have changed since do
            nothing.
        block: the number of the block of positions to use; None: none.
        solve: whether a solution begins.
        install: whether the latest solution drafts from here on.
        end: whether learning ends.
    """

    generation: int
    block: int | None = None
    solve: bool = False
    install: bool = False
    end: bool = False


class Learning:
    """The scheduler's side.

    Args:
        size: of the target's states, d.

    Attributes:
        installed: whether the workers draft with learned heads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start(Report())

    def _start(self, report: Report) -> None:
        self.installed = False
        self._report = report
        self._ended = False
        self._block = -1  # the latest one that was ordered
        self._positions = 0  # of the blocks that were ordered
        self._marks = [mark * self.size for mark in MARKS]
        self._solutions = 0  # ordered
        self._compared = 0
        self._useless = 0  # the latest of them

    def observe(self, report: Report) -> None:
        """Note a report."""
        if report.generation != self._report.generation:
            self._start(report)
        self._report = report

    def orders(self) -> Orders | None:
        """What the coming step orders; None after the end."""
        if self._ended:
            return None
        report = self._report
        block = report.seen // BLOCK - 1
        ordered = None
        if block > self._block:
            ordered = self._block = block
            self._positions += BLOCK
        install = False
        if report.solutions > self._compared:
            self._compared = report.solutions
            sure = report.gains()
            # Better heads cost no more than those in use
            install = sure or (self.installed and report.gained > 0)
            self._useless = 0 if sure else self._useless + 1
            self.installed |= install
            self._log(report, install)
        reached = [mark for mark in self._marks if mark <= self._positions]
        idle = self._compared == self._solutions
        solve = bool(reached) and idle and report.held >= HELD
        if solve:
            self._solutions += 1
            self._marks = self._marks[len(reached) :]
        last = idle and not solve and not self._marks
        self._ended = last or self._useless >= USELESS
        return Orders(report.generation, ordered, solve, install, self._ended)

    def _log(self, report: Report, installed: bool) -> None:
        accepted = report.accepted / HELD
        logger.info(
            "vllm-ppd: heads learned from %d positions %s: %.3f drafts are accepted "
            "at each of %d held-out positions (before: %.3f)",
            self._positions,
            "draft from here on" if installed else "gain nothing",
            accepted,
            HELD,
            accepted - report.gained / HELD,
        )
