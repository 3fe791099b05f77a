# SPDX-License-Identifier: Apache-2.0
"""The number of drafts on runner V2, which vLLM's scheduler looks up by batch size: none, or all.

A step is scheduled before the step before it is verified, so a choice holds for CYCLE steps: when the next choice is
made, the first of them has been verified. The scheduler alone chooses, so tensor-parallel ranks agree.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController, State
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts

CYCLE = 3  # steps: a draft is made behind one, verified in the next, and known when the third is scheduled
FIRST_WAIT = 8  # cycles in OFF before an exploration, of which a cycle has one step
EXPLORED = CYCLE / 128  # of the time in OFF goes to explorations, times the steps of a cycle


class ScheduledDrafts:
    """What vLLM's scheduler has as `dynamic_sd_lookup`: read once a step, with the number of requests in it.

    Args:
        drafts: N.
        limit: requests of the largest batch that drafts (None: any).
        max_num_seqs: the largest batch.
    """

    def __init__(self, drafts: int, limit: int | None, max_num_seqs: int) -> None:
        self.drafts, self.limit, self.max_num_seqs = drafts, limit, max_num_seqs
        self.controller: DraftLengthController | None = None  # None: N drafts
        self.counts: Counter[str] = Counter()  # for our counters at /metrics
        self._chosen, self._left = drafts, 0
        self._req_ids: list[str] = []
        self._kinds = np.zeros(0, dtype=np.int64)

    def follow(self, costs: StepCosts) -> None:
        """Choose by the costs of steps from here on."""
        self.controller = DraftLengthController(costs, counts=(self.drafts,), first_wait=FIRST_WAIT, explored=EXPLORED)
        self._left = 0

    def __len__(self) -> int:
        return self.max_num_seqs + 1

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def __getitem__(self, requests: int) -> int:
        """Drafts of each request to make behind the step that is being scheduled."""
        if self.limit is not None and requests > self.limit:
            self.counts["drafting_off_steps"] += 1
            return 0
        controller = self.controller
        if controller is None:
            return self.drafts
        if not self._left:
            self._left = CYCLE
            self._chosen = self._choose(controller, requests)
        elif controller.state is State.EXPLORING:
            self._chosen = 0
        self._left -= 1
        if not self._chosen:
            self.counts["drafting_off_steps"] += 1
            self.counts["suppressed_drafts"] += requests * self.drafts
        elif controller.state is State.EXPLORING:
            self.counts["exploration_steps"] += 1
        return self._chosen

    def _choose(self, controller: DraftLengthController, requests: int) -> int:
        if not self._req_ids:  # nothing was verified yet
            return self.drafts
        controller.acceptance.align(self._req_ids)  # others may have come since drafts were verified last
        allowed = np.full(len(self._req_ids), self.drafts)
        return int(controller.choose(allowed, len(self._req_ids), self._kinds).max())

    def observe(self, req_ids: list[str], drafts: list[int], emitted: list[int], greedy: list[bool]) -> None:
        """Count a step's verified drafts.

        Args:
            req_ids: of the requests that emitted tokens.
            drafts: that each of them had.
            emitted: tokens of each.
            greedy: whether each decodes greedily.
        """
        if self.controller is None or not req_ids:
            return
        self._req_ids, self._kinds = req_ids, np.array(greedy, dtype=np.int64)
        if any(drafts):
            self.controller.acceptance.align(req_ids)
            self.controller.acceptance.kinds = self._kinds
            self.controller.observe(req_ids, np.array(emitted), np.array(drafts))
