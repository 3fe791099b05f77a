# SPDX-License-Identifier: Apache-2.0
"""The number of drafts, which vLLM's scheduler looks up by batch size: none, all, or
another that was measured.

A step is scheduled before its predecessor is verified, so a choice holds for CYCLE
steps: when the next choice is made, the first of them has been verified. The scheduler
alone chooses, so tensor-parallel ranks agree.
"""

from collections import Counter

import numpy as np

from vllm_ppd.vllm_plugins.draft_length.controller import (
    KINDS,
    DraftLengthController,
    State,
)
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.repeated_text import RepeatedText

# Counters of steps without drafts, by reason: drafts are not expected to pay off; no
# request has a lookup match, or none may draft; more requests than
# disable_by_batch_size.
COST, NO_MATCH, BATCH_SIZE = DRAFTING_OFF = tuple(
    f"drafting_off_steps/{reason}" for reason in ("cost", "no_match", "batch_size")
)
# steps: a draft is made after the first, verified in the second, and known when the
# third is scheduled
CYCLE = 3
FIRST_WAIT = 8  # cycles in OFF before an exploration, which takes a step of a cycle
# Share of the time in OFF for explorations, times the steps of a cycle
EXPLORED = CYCLE / 128


class ScheduledDrafts:
    """A replacement of the scheduler's `dynamic_sd_lookup`, which it reads once a step
    with the number of requests.

    Args:
        drafts: N.
        limit: requests of the largest batch that drafts (None: any).
        max_num_seqs: the largest batch.
        texts: tells which requests can look drafts up (None: there are no lookups).
        lookups_alone: whether other requests have no drafts.
    """

    def __init__(
        self,
        drafts: int,
        limit: int | None,
        max_num_seqs: int,
        texts: RepeatedText | None = None,
        lookups_alone: bool = False,
    ) -> None:
        self.drafts = drafts
        self.limit = limit
        self.max_num_seqs = max_num_seqs
        self.texts = texts
        self.lookups_alone = lookups_alone
        self.controller: DraftLengthController | None = None  # None: always N drafts
        # Drafts per request after the latest step, which the next step verifies
        self.latest = drafts
        self.counts: Counter[str] = Counter()  # for our counters at /metrics
        self._chosen = drafts
        self._left = 0
        self._any_allowed = True
        self._req_ids: list[str] = []
        self._greedy = np.zeros(0, dtype=np.int64)
        self._may_draft = np.zeros(0, dtype=bool)

    def follow(self, costs: StepCosts) -> None:
        """Choose by the costs of steps from here on."""
        self.controller = DraftLengthController(costs, 2 * KINDS, FIRST_WAIT, EXPLORED)
        self._left = 0

    def __len__(self) -> int:
        return self.max_num_seqs + 1

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        counts = self.counts
        self.counts = Counter()
        return dict(counts)

    def __getitem__(self, requests: int) -> int:
        """Drafts per request to make after the step that is being scheduled."""
        self.latest = self._after_step(requests)
        return self.latest

    def _after_step(self, requests: int) -> int:
        if self.limit is not None and requests > self.limit:
            self.counts[BATCH_SIZE] += 1
            return 0
        controller = self.controller
        if controller is None:
            return self.drafts
        if not self._left:
            self._left = CYCLE
            self._chosen = self._choose(controller)
        elif controller.state is State.EXPLORING:
            self._chosen = 0
        self._left -= 1
        if not self._chosen:
            self.counts[COST if self._any_allowed else NO_MATCH] += 1
            self.counts["suppressed_drafts"] += requests * self.drafts
        elif controller.state is State.EXPLORING:
            self.counts["exploration_steps"] += 1
        return self._chosen

    def _choose(self, controller: DraftLengthController) -> int:
        if not self._req_ids:  # nothing is verified yet
            return self.drafts
        # Requests may have arrived since the last verification
        controller.acceptance.align(self._req_ids)
        kinds, looked_up = self._kinds_of(self._req_ids, self._greedy)
        allowed = self._may_draft & (looked_up | (not self.lookups_alone))
        self._any_allowed = bool(allowed.any())
        return controller.choose(allowed, kinds)

    def _kinds_of(
        self, req_ids: list[str], greedy: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Kind [requests] of each request's drafts, whether they are looked up [requests])."""
        looked_up = np.array(
            self.texts.repeats(req_ids) if self.texts else [False] * len(req_ids),
            dtype=bool,
        )
        return greedy + KINDS * looked_up, looked_up

    def observe(
        self,
        req_ids: list[str],
        drafts: list[int],
        emitted: list[int],
        greedy: list[bool],
        may_draft: list[bool],
    ) -> None:
        """Count a step's verified drafts, which were made for the texts known here.

        Args:
            req_ids: of the requests that emitted tokens.
            drafts: that each of them had.
            emitted: tokens of each.
            greedy: whether each decodes greedily.
            may_draft: whether each may draft; all count for the cost of a step.
        """
        if self.controller is None or not req_ids:
            return
        self._req_ids = req_ids
        self._may_draft = np.array(may_draft)
        self._greedy = np.array(greedy, dtype=np.int64)
        if any(drafts):
            kinds, looked_up = self._kinds_of(req_ids, self._greedy)
            if looked_up.any():
                self.counts["lookup_steps"] += 1
            self.controller.observe(req_ids, np.array(emitted), np.array(drafts), kinds)
