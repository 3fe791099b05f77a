# SPDX-License-Identifier: Apache-2.0
"""Bypassed steps: while drafting is off, steps are prepared and run as in an engine without speculation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Bypass:
    """A number of decode steps of the same requests; it ends early when other requests or prompts come."""

    def __init__(self) -> None:
        self.active = False  # whether the step that runs now is bypassed
        self._left = self._taken = 0
        self._requests: Collection[str] = frozenset()

    def begin(self, steps: int, requests: Collection[str]) -> None:
        """Bypass so many steps from the next one on, as long as they are decode steps of these requests."""
        self._left, self._requests = steps, requests

    def begin_step(self, scheduler_output: Any) -> None:
        """A step begins."""
        scheduled = scheduler_output.num_scheduled_tokens
        others = scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        decoding = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        self.active = bool(self._left > 0 and not others and decoding and scheduled.keys() == set(self._requests))
        self._left = self._left - 1 if self.active else 0
        self._taken += self.active

    def take_steps(self) -> int:
        """Steps bypassed since the last call."""
        taken, self._taken = self._taken, 0
        return taken
