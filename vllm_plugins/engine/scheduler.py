# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with our choice of the number of drafts, and with our counters.

A step is chosen for when it is scheduled: it makes k drafts, which the next step
verifies. What was chosen travels with the step as a Step, and its output tells how long
it took and what was accepted. Under asynchronous scheduling, the next step is scheduled
before that output is there.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.request_options import request_options
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts
from vllm_ppd.vllm_plugins.draft_length.policy import STEP, DraftPolicy, Step
from vllm_ppd.vllm_plugins.draft_length.watch import AcceptanceWatch
from vllm_ppd.vllm_plugins.engine.metrics import (
    ATTRIBUTE,
    BATCH_SIZE,
    COST,
    MATCHED,
    NO_MATCH,
    SERVED,
    SERVED_PLAIN,
    STATISTICS,
    WITHOUT_DRAFTS,
    Counts,
    count_in_process,
)

logger = logging.getLogger("vllm.vllm_ppd")

# Kinds of requests for their acceptance: sampling or greedy, and the same with a match
# in their own text
KINDS = 4
GREEDY = 1
LOOKED_UP = 2
OPTED_OUT = -1
MAX_FINISHED = 64  # finished requests whose kinds are kept
# Of a step without drafts, and of one with all
GUESSED_SECONDS = [1.0, 1.2]
LOG_SECONDS = 10.0  # between lines about the choice


class CountingScheduler(Scheduler):
    """Carries counts from the steps' outputs to the statistics, in the open dictionary
    of KV connectors' statistics.
    """

    _pending: dict[str, float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = defaultdict(float)

    def report(self, counts: Counts) -> None:
        """Add counts to the next statistics."""
        count_in_process(counts)
        if self.log_stats:
            for name, amount in counts.items():
                self._pending[name] += amount

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        counts: Counts = getattr(model_runner_output, ATTRIBUTE, {})
        if counts:
            self.report(counts)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._pending:
            stats.kv_connector_stats = {
                **(stats.kv_connector_stats or {}),
                STATISTICS: dict(self._pending),
            }
            self._pending.clear()
        return stats


class DraftingScheduler(CountingScheduler):
    """Chooses the number of drafts of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = active_config(self.vllm_config)
        assert config is not None
        self.config = config
        self.max_requests = config.disable_by_batch_size  # of a batch that drafts
        # None: always as many drafts as configured
        self.policy: DraftPolicy | None = None
        self.drafts = self.num_spec_tokens  # that the latest step makes
        self._by_batch_size: Any = self.dynamic_sd_lookup
        self._watch = None if config.spec.looks_up_alone else AcceptanceWatch()
        self._kinds: dict[str, int] = {}  # of the requests
        self._in_flight = 0  # steps
        # When the latest output came; None: the engine waited for requests
        self._last_output: float | None = None
        self._last_log = -math.inf
        asynchronous = self.scheduler_config.async_scheduling
        logger.info(
            "vllm-ppd: %s scheduling",
            "asynchronous" if asynchronous else "synchronous",
        )

    def follow(self, table: CostTable | None) -> None:
        """Choose by the seconds of steps from here on; None: not measured."""
        if table is None:
            counts = [0, self.num_spec_tokens]
            table = CostTable(sizes=[1], counts=counts, seconds=[GUESSED_SECONDS])
        executor = self.parallel_config.distributed_executor_backend
        # Every rank has a scheduler there, and their clocks differ.
        clock = (
            self.config.adaptive != "table" and executor != "external_launcher"
        )
        self.policy = DraftPolicy(StepCosts(table), KINDS, clock)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        kind = OPTED_OUT
        if params is not None and request_options(params.extra_args).ppd_draft:
            kind = GREEDY if params.temperature == 0 else 0
        self._kinds[request.request_id] = kind
        if len(self._kinds) > 2 * len(self.requests) + MAX_FINISHED:
            self._kinds = {
                req_id: self._kinds[req_id] for req_id in self.requests
            }

    # Scheduling -----------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # vLLM pads a request that is admitted with one token to compute by drafts,
        # unless it looks the number of drafts up. A decode instance of disaggregated
        # serving admits every request so, and a step that is not uniform takes no
        # whole-model graph.
        pads = self.drafts == self.num_spec_tokens
        self.dynamic_sd_lookup = None if pads else self._by_batch_size
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.num_scheduled_tokens:
            self._in_flight += 1
            self._choose(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _choose(self, scheduler_output: SchedulerOutput) -> None:
        """Set the drafts that a scheduled step makes."""
        tokens = scheduler_output.num_scheduled_tokens
        verified = scheduler_output.scheduled_spec_decode_tokens
        before = len(next(iter(verified.values()), ()))
        decoding = list(tokens)
        prompt = 0
        ahead = 0
        if scheduler_output.total_num_scheduled_tokens != len(tokens) * (
            1 + before
        ):
            decoding = []
            for req_id, scheduled in tokens.items():
                left = self._prompt_left(req_id, scheduled)
                if left:
                    prompt += scheduled
                    ahead += left
                else:
                    prompt += scheduled - 1 - len(verified.get(req_id, ()))
                    decoding.append(req_id)
        if prompt and self.waiting:
            # They wait for the budget of tokens; beside no prompt, for KV blocks.
            ahead = self.max_num_scheduled_tokens
        drafted = 0
        useful = any(map(self._uses_drafts, decoding))
        if useful:
            ahead = min(ahead, self.max_num_scheduled_tokens)
            drafted = self._chosen(decoding, ahead, len(tokens))
        elif decoding:
            self.report({NO_MATCH: 1})
        step = Step(
            requests=len(decoding),
            prompt_tokens=prompt,
            verified=before if len(verified) in (0, len(decoding)) else None,
            drafted=drafted,
            useful=useful,
        )
        setattr(scheduler_output, STEP, step)
        scheduler_output.num_spec_tokens_to_schedule = step.drafted
        self.drafts = step.drafted

    def _prompt_left(self, req_id: str, scheduled: int) -> int:
        """Tokens of a request that are known and not computed after a step."""
        request = self.requests[req_id]
        known = request.num_tokens + request.num_output_placeholders
        return max(known - request.num_computed_tokens - scheduled, 0)

    def _uses_drafts(self, req_id: str) -> bool:
        """Whether a decoding request may draft, and another step of it may follow."""
        request = self.requests[req_id]
        # At least one token of this step, and one of a step in flight
        emitted = request.num_output_tokens + 1
        emitted += request.num_output_placeholders > 0
        return self._kinds[req_id] != OPTED_OUT and emitted < request.max_tokens

    def _chosen(self, decoding: list[str], ahead: int, requests: int) -> int:
        if self.max_requests is not None and requests > self.max_requests:
            self.report({BATCH_SIZE: 1})
            return 0
        if self.policy is None:
            return self.num_spec_tokens
        lowest = LOOKED_UP if self.config.spec.looks_up_alone else 0
        drafting = [name for name in decoding if self._kinds[name] >= lowest]
        before = self.policy.current
        drafts = self.policy.choose(
            len(decoding),
            ahead,
            drafting,
            [self._kinds[name] for name in drafting],
        )
        if self.policy.current != before:
            self._log_choice(len(decoding), before)
        if not drafts:
            reason = COST if drafting else NO_MATCH
            suppressed = len(decoding) * self.num_spec_tokens
            self.report({reason: 1, "suppressed_drafts": suppressed})
        if self.policy.exploring:
            self.report({"exploration_steps": 1})
        return drafts

    def _log_choice(self, requests: int, before: int) -> None:
        now = time.monotonic()
        if now - self._last_log < LOG_SECONDS:
            return
        self._last_log = now
        assert self.policy is not None and self.policy.best is not None
        choice = self.policy.best
        logger.info(
            "vllm-ppd: %d drafts in place of %d at %d requests: %.2f of the tokens in "
            "%.2f of the seconds of a step",
            choice.drafts,
            before,
            requests,
            choice.tokens,
            choice.cost,
        )

    # Outputs --------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        step: Step | None = getattr(scheduler_output, STEP, None)
        if step is None:
            self._last_output = None
            return super().update_from_output(
                scheduler_output, model_runner_output
            )
        self._in_flight -= 1
        now = time.perf_counter()
        seconds = None if self._last_output is None else now - self._last_output
        self._observe(step, seconds, scheduler_output, model_runner_output)
        matched = getattr(model_runner_output, MATCHED, None)
        if matched is not None:
            self._follow_matches(model_runner_output.req_ids, matched)
        result = super().update_from_output(scheduler_output, model_runner_output)
        busy = self._in_flight or self.running or self.waiting
        self._last_output = now if busy else None
        return result

    def _observe(
        self,
        step: Step,
        seconds: float | None,
        scheduler_output: SchedulerOutput,
        output: Any,
    ) -> None:
        """Learn from a step's seconds and verified drafts."""
        index = output.req_id_to_index
        sampled = output.sampled_token_ids
        names = [
            name
            for name in scheduler_output.scheduled_spec_decode_tokens
            if self._kinds.get(name, OPTED_OUT) != OPTED_OUT
            and sampled[index[name]]
        ]
        emitted = [len(sampled[index[name]]) for name in names]
        if self._watch is not None and step.verified:
            self._watch.observe(
                len(names), step.verified, sum(emitted) - len(names)
            )
        if self.policy is not None:
            kinds = [self._kinds[name] for name in names]
            self.policy.observe(step, seconds, names, kinds, emitted)
            if seconds is not None and step.steady():
                self._report_served(step, seconds, sum(map(len, sampled)))

    def _report_served(self, step: Step, seconds: float, emitted: int) -> None:
        """Count a step of decoding alone, and its seconds if it had no drafts."""
        tokens = emitted / step.requests
        steps, durations, lengths = SERVED if step.drafted else SERVED_PLAIN
        counts = {steps: 1.0, durations: seconds, lengths: tokens}
        if step.drafted:
            assert self.policy is not None
            cost = self.policy.seconds.relative(
                step.requests, 0, 0, step.drafted
            )[0]
            counts[WITHOUT_DRAFTS] = seconds * tokens / cost
        self.report(counts)

    def _follow_matches(
        self, req_ids: Iterable[str], matched: Iterable[int]
    ) -> None:
        """Note which requests had a match in their own text."""
        found = False
        for req_id, match in zip(req_ids, matched, strict=True):
            kind = self._kinds.get(req_id, OPTED_OUT)
            if kind != OPTED_OUT:
                self._kinds[req_id] = kind % LOOKED_UP + LOOKED_UP * match
                found = found or bool(match)
        if found:
            self.report({"lookup_steps": 1})


class SyncDraftingScheduler(DraftingScheduler):
    """For synchronous scheduling."""


class AsyncDraftingScheduler(DraftingScheduler, AsyncScheduler):
    """For asynchronous scheduling."""
