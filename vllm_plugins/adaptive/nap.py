# SPDX-License-Identifier: Apache-2.0
"""Steps on end in which nobody drafts and nothing is decided: they are vLLM's own, as if it did not speculate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

NOBODY: Collection[str] = frozenset()


class Nap:
    """Some steps of decoding by the same requests; over before if other requests or prompts come."""

    def __init__(self) -> None:
        self.steps = 0  # that it is to take; 0: there is none
        self.asleep = False  # whether nothing is looked at after the step that runs now
        self._past = 0  # steps of it so far, the one that runs now included
        self._requests = NOBODY

    def begin(self, steps: int, scheduled: dict[str, int]) -> None:
        """To begin with the next step, if that is one of decoding by the requests of this one."""
        self.steps, self._past, self._requests = steps, 0, scheduled.keys()

    def begin_step(self, scheduler_output: Any) -> int:
        """A step begins; returns how many were slept through where the nap is over before it."""
        if not self.steps:
            return 0
        scheduled = scheduler_output.num_scheduled_tokens
        new = scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if new or scheduler_output.total_num_scheduled_tokens != len(scheduled) or scheduled.keys() != self._requests:
            slept, self.steps, self.asleep = self._past, 0, False
            return slept
        self._past += 1
        self.asleep = self._past < self.steps
        return 0

    def end(self) -> int:
        """The steps that it took; 0 where there was none."""
        steps, self.steps = self.steps, 0
        return steps
