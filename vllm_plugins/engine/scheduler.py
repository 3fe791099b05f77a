# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with our choice of the drafts, and with our counters.

A step is chosen for when it is scheduled: it makes k drafts at an exit, which the next
step verifies. What was chosen travels with the step as a Step, and its output tells how
long it took and what was accepted. Under asynchronous scheduling, the next step is scheduled
before that output is there.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.config.request_options import request_options
from vllm_ppd.vllm_plugins.draft_length.costs import (
    NO_DRAFTS,
    STEP_COSTS,
    CostTable,
    Plan,
    StepCosts,
)
from vllm_ppd.vllm_plugins.draft_length.learning import LEARNED, Learning
from vllm_ppd.vllm_plugins.draft_length.policy import (
    STEP,
    Choice,
    DraftPolicy,
    Step,
)
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
)

logger = logging.getLogger("vllm.vllm_ppd")

# Kinds of requests for their acceptance: sampling or greedy, and the same with drafts
# from their own text
KINDS = 4
GREEDY = 1
LOOKED_UP = 2
OPTED_OUT = -1
MAX_FINISHED = 64  # finished requests whose kinds are kept
GUESSED_COST = 1.2  # of a step with all drafts, over one without
LOG_SECONDS = 10.0  # between lines about the choice


class CountingScheduler(Scheduler):
    """Carries counts from the steps' outputs to the statistics, in the open dictionary
    of KV connectors' statistics.
    """

    _pending: dict[str, float]  # counts since the latest statistics

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = defaultdict(float)

    def report(self, counts: Counts) -> None:
        """Add counts to the next statistics."""
        for name, amount in counts.items():
            self._pending[name] += amount

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        self.report(getattr(model_runner_output, ATTRIBUTE, {}))
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        pending = self._pending
        self._pending = defaultdict(float)
        if stats is not None and pending:
            stats.kv_connector_stats = {
                **(stats.kv_connector_stats or {}),
                STATISTICS: dict(pending),
            }
        return stats


class DraftingScheduler(CountingScheduler):
    """Chooses the number of drafts of each step."""

    learning: Learning | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config = required_config(self.vllm_config, self)
        self.max_requests = config.disable_by_batch_size  # of a batch that drafts
        # None: always as many drafts as configured. `policy` is vLLM's, of its queues.
        self.draft_policy: DraftPolicy | None = None
        self.drafts = self.num_spec_tokens  # that the latest step makes
        self.exit = 0  # at which it reads them, an index
        self._by_batch_size: Any = self.dynamic_sd_lookup
        executor = self.parallel_config.distributed_executor_backend
        # If every rank has a scheduler, their clocks differ, and so does the step in which
        # each learns of a match.
        self._one_scheduler = executor != "external_launcher"
        if config.learns:
            model_config = self.vllm_config.model_config
            self.learning = Learning(model_config.get_hidden_size())
        self._kinds: dict[str, int] = {}  # of the requests
        # Drafts of requests that asked for fewer than all
        self._limits: dict[str, int] = {}
        self._may_draft = True  # whether any request may, by the latest choice
        # Requests of the latest output, and whether each took drafts from its own text
        self._matches: tuple[list[str], list[int]] = ([], [])
        self._matched = False  # whether any had
        self._in_flight = 0  # steps
        # When the latest output came; None: the engine waited for requests
        self._last_output: float | None = None
        self._last_log = -math.inf
        if hasattr(self.kv_cache_config, STEP_COSTS):
            self.follow(getattr(self.kv_cache_config, STEP_COSTS))

    def follow(self, table: CostTable | None) -> None:
        """Choose by the seconds of steps from here on; None: not measured."""
        if table is None:
            counts = [0, self.num_spec_tokens]
            exits = self.config.num_exits
            row = [1.0, *[GUESSED_COST] * exits]
            table = CostTable(
                sizes=[1], counts=counts, exits=exits, seconds=[row]
            )
        clock = self.config.adaptive != "table" and self._one_scheduler
        self.draft_policy = DraftPolicy(
            StepCosts(table), KINDS, clock, self._limits
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        req_id = request.request_id
        kind = OPTED_OUT
        if params is not None:
            most = self.num_spec_tokens
            drafts = request_options(params.extra_args).most_drafts(most)
            if drafts:
                kind = GREEDY if params.temperature == 0 else 0
            if 0 < drafts < most:
                self._limits[req_id] = drafts
        self._kinds[req_id] = kind
        if len(self._kinds) > 2 * len(self.requests) + MAX_FINISHED:
            for of_requests in (self._kinds, self._limits):
                for name in of_requests.keys() - self.requests.keys():
                    del of_requests[name]

    @property
    def _alone(self) -> bool:
        """Whether only requests with a match have drafts, as far as is known."""
        installed = self.learning is not None and self.learning.installed
        alone = self.config.spec.looks_up_alone and not installed
        return alone and self._one_scheduler

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
        decoding: Collection[str] = tokens
        prompt = 0
        ahead = 0
        alone = len(tokens) * (1 + before)
        if scheduler_output.total_num_scheduled_tokens != alone:
            decoding, prompt, ahead = self._beside_prompts(scheduler_output)
        if prompt and self.waiting:
            # They wait for the budget of tokens; beside no prompt, for KV blocks.
            ahead = self.max_num_scheduled_tokens
        exit = self.exit if before else 0
        drafted = NO_DRAFTS
        useful = any(map(self._uses_drafts, decoding))
        if useful:
            ahead = min(ahead, self.max_num_scheduled_tokens)
            drafted = self._chosen(decoding, ahead, len(tokens))
        elif decoding:
            self.report({NO_MATCH: 1})
        alike = len(verified) in (0, len(decoding))
        step = Step(
            requests=len(decoding),
            prompt_tokens=prompt,
            verified=Plan(before, exit) if alike else None,
            drafted=drafted,
            useful=useful,
            orders=None if self.learning is None else self.learning.orders(),
        )
        setattr(scheduler_output, STEP, step)
        self.drafts, self.exit = step.drafted
        scheduler_output.num_spec_tokens_to_schedule = self.drafts

    def _beside_prompts(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[list[str], int, int]:
        """(Requests that decode after a step, its tokens of prompts, those to come)."""
        verified = scheduler_output.scheduled_spec_decode_tokens
        decoding = []
        prompt = 0
        ahead = 0
        for req_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            known = request.num_tokens + request.num_output_placeholders
            left = known - request.num_computed_tokens - scheduled
            if left > 0:
                prompt += scheduled
                ahead += left
            else:
                prompt += scheduled - 1 - len(verified.get(req_id, ()))
                decoding.append(req_id)
        return decoding, prompt, ahead

    def _uses_drafts(self, req_id: str) -> bool:
        """Whether a decoding request may draft, and another step of it may follow."""
        if self._kinds[req_id] == OPTED_OUT:
            return False
        request = self.requests[req_id]
        # At least one token of this step, and one of a step in flight
        emitted = request.num_output_tokens + 1
        emitted += request.num_output_placeholders > 0
        return emitted < request.max_tokens

    def _chosen(
        self, decoding: Collection[str], ahead: int, requests: int
    ) -> Plan:
        if self.max_requests is not None and requests > self.max_requests:
            self.report({BATCH_SIZE: 1})
            return NO_DRAFTS
        policy = self.draft_policy
        if policy is None:
            return Plan(self.num_spec_tokens)
        # Lookups alone wait for a match
        waits = self._alone and self._matched != self._may_draft
        if waits or not policy.holds(len(decoding), ahead):
            self._choose_anew(policy, decoding, ahead)
        if policy.exploring:
            self.report({"exploration_steps": 1})
        elif not policy.latest.drafts:
            reason = COST if self._may_draft else NO_MATCH
            suppressed = len(decoding) * self.num_spec_tokens
            self.report({reason: 1, "suppressed_drafts": suppressed})
        return policy.latest

    def _choose_anew(
        self, policy: DraftPolicy, decoding: Collection[str], ahead: int
    ) -> None:
        self._apply_matches()
        lowest = LOOKED_UP if self._alone else 0
        kinds = self._kinds
        drafting = [name for name in decoding if kinds[name] >= lowest]
        self._may_draft = bool(drafting)
        before = policy.current
        policy.choose(
            len(decoding), ahead, drafting, [kinds[name] for name in drafting]
        )
        if policy.current != before and policy.best is not None:
            self._log_choice(len(decoding), before, policy.best)

    def _log_choice(self, requests: int, before: Plan, choice: Choice) -> None:
        now = time.monotonic()
        if now - self._last_log < LOG_SECONDS:
            return
        self._last_log = now
        logger.info(
            "vllm-ppd: %s in place of %s at %d requests: %.2f of the tokens in %.2f of "
            "the seconds of a step",
            self._in_words(choice.plan),
            self._in_words(before),
            requests,
            choice.tokens,
            choice.cost,
        )

    def _in_words(self, plan: Plan) -> str:
        drafts = f"{plan.drafts} drafts"
        if self.config.num_exits == 1 or not plan.drafts:
            return drafts
        return f"{drafts} at layer {self.config.exits[plan.exit]}"

    # Outputs --------------------------------------------------------------------------

    def set_pause_state(self, *state: Any) -> None:
        """vLLM's; a pause is not a step's time."""
        super().set_pause_state(*state)
        self._last_output = None

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
        if matched is not None and self._one_scheduler:
            self._matches = model_runner_output.req_ids, matched
            self._matched = any(matched)
            if self._matched:
                self.report({"lookup_steps": 1})
        report = getattr(model_runner_output, LEARNED, None)
        if self.learning is not None and report is not None:
            self.learning.observe(report)
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
        policy = self.draft_policy
        if policy is None:
            return
        verified = scheduler_output.scheduled_spec_decode_tokens
        # (Request, its kind when the drafts were made, tokens that it emitted)
        rows: list[tuple[str, int, int]] = []
        if policy.learns(step) and verified:
            self._apply_matches()
            for name, tokens in zip(
                output.req_ids, output.sampled_token_ids, strict=True
            ):
                kind = self._kinds.get(name, OPTED_OUT)
                if tokens and kind != OPTED_OUT and name in verified:
                    rows.append((name, kind, len(tokens)))
        names, kinds, emitted = zip(*rows, strict=True) if rows else ((), (), ())
        policy.observe(step, seconds, names, kinds, emitted)
        if seconds is not None and step.steady():
            self._report_served(step, seconds, output.sampled_token_ids)

    def _report_served(
        self, step: Step, seconds: float, sampled: list[list[int]]
    ) -> None:
        """Count a step of decoding alone, and its seconds if it had no drafts."""
        tokens = sum(map(len, sampled)) / step.requests
        drafts = step.drafted.drafts
        steps, durations, lengths = SERVED if drafts else SERVED_PLAIN
        counts = {steps: 1.0, durations: seconds, lengths: tokens}
        if drafts:
            assert self.draft_policy is not None
            cost = self.draft_policy.seconds.relative(
                step.requests, 0, NO_DRAFTS, step.drafted
            )[0]
            counts[WITHOUT_DRAFTS] = seconds * tokens / cost
        self.report(counts)

    def _apply_matches(self) -> None:
        """Note in the requests' kinds which took drafts from their own text."""
        kinds = self._kinds
        for name, match in zip(*self._matches, strict=True):
            kind = kinds.get(name, OPTED_OUT)
            if kind != OPTED_OUT and match != kind // LOOKED_UP:
                kinds[name] = kind % LOOKED_UP + LOOKED_UP * match
        self._matches = [], []


class AsyncDraftingScheduler(DraftingScheduler, AsyncScheduler):
    """For asynchronous scheduling."""
