# SPDX-License-Identifier: Apache-2.0
"""Timed decode steps of dummy requests on runner V1."""

import math
import time
from collections.abc import Sequence
from typing import Any

from vllm_ppd.vllm_plugins.engine.dummy_batch import TOKEN, DummyBatch, length_needed

STEPS = 3  # with each number of drafts; all but the first are timed


class V1Batch(DummyBatch):
    """Dummy requests that get the engine's drafts as from vLLM's scheduler."""

    def sample(self, tokens: dict[str, int]) -> None:
        result = self.runner.sample_tokens(None)
        for i, name in enumerate(self.names):
            if name in result.req_id_to_index:
                self.emitted[i] += len(result.sampled_token_ids[result.req_id_to_index[name]])

    def take_drafts(self) -> list[list[int]]:
        """Drafts of each request for the next step, by the engine's drafter."""
        made = self.runner.take_draft_token_ids()
        drafts_of = {} if made is None else dict(zip(made.req_ids, made.draft_token_ids, strict=True))
        return [drafts_of.get(name, []) for name in self.names]


def time_steps(drafter: Any, looked_up: bool, requests: int, counts: Sequence[int]) -> list[float]:
    """Seconds of a decode step with each number of drafts per request, the least of those timed.

    Args:
        drafter: our proposer, bound to the runner.
        looked_up: whether the drafts are not the method's own, and the method makes none.
        requests: number of requests.
        counts: numbers of drafts, 0 among them.
    """
    planner, seconds = drafter.planner, {}
    most = drafter.config.max_drafting_requests or requests
    with V1Batch(drafter.runner, requests, length_needed(counts, STEPS)) as batch:
        drafts: list[list[int]] = [[] for _ in batch.names]
        # 0 drafts last: DynaMo's requests do not draft again after such a step.
        for count in sorted(counts, reverse=True):
            planner.forced = 0 if looked_up else count
            seconds[count] = math.inf
            for step in range(STEPS):
                again = step > 0  # the first step verifies a different number of drafts than it makes
                if looked_up or again:  # DynaMo may have backed off to fewer drafts of its own
                    made = [[] for _ in batch.names] if looked_up else drafts
                    drafts = [[*ids, *[TOKEN] * count][:count] if i < most else [] for i, ids in enumerate(made)]
                if again and count == 0 and planner.sources is None:
                    drafter.bypass.begin(1, batch.names)
                started = time.perf_counter()
                batch.decode(drafts)
                drafts = batch.take_drafts()
                if again:
                    seconds[count] = min(seconds[count], time.perf_counter() - started)
    planner.forced = None
    return [seconds[count] for count in counts]
