# SPDX-License-Identifier: Apache-2.0
"""Decode steps of dummy requests for timing, run by vLLM's own model runner in an
engine that is not serving yet.

A step is everything that the model runner does: inputs, forward pass, verification,
drafting. The scheduler, the detokenizer and communication are left out; they take about
the same with and without drafts, so relative costs are a little too high. Contexts are
short: if attention over a long context is limited by memory, drafts are relatively
cheaper than measured; if it is limited by compute, more expensive.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Self
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

from vllm_ppd.vllm_plugins.draft_length.costs import Plan
from vllm_ppd.vllm_plugins.draft_length.policy import STEP, Step

TOKEN = 1  # the token of prompts, and of drafts as the scheduler names them
# Steps with each plan
WARM = 1
TIMED = 3
STEPS = WARM + TIMED


class DummyBatch:
    """Requests in an idle engine, scheduled as vLLM's scheduler would, and removed when
    the context ends.

    Drafts stay on the device, and the host does not wait for tokens.

    Args:
        runner: vLLM's model runner, its KV cache allocated.
        requests: number of requests.
        plans: of the steps to come.
    """

    def __init__(self, runner: Any, requests: int, plans: Sequence[Plan]) -> None:
        self.runner = runner
        self.first = max(plans)
        numbers = itertools.count(1)  # block 0 is vLLM's null block
        sizes = blocks_per_request(runner, plans)
        self.blocks = {
            f"vllm-ppd dummy {i}": tuple(
                list(itertools.islice(numbers, size)) for size in sizes
            )
            for i in range(requests)
        }
        self.emitted = 1  # tokens, if every draft is accepted

    def __enter__(self) -> Self:
        # Sampled, as greedy requests verify slightly faster. No draft is dropped for
        # lack of confidence.
        params = SamplingParams(
            temperature=1.0,
            max_tokens=self.runner.max_model_len,
            extra_args={"ppd_eps_b": 0.0},
        )
        output = SchedulerOutput.make_empty()
        # The runner learns with the next step that an idle engine's last requests have
        # ended.
        output.finished_req_ids = set(self.runner.req_states.req_id_to_index)
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=[TOKEN],
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=blocks,
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=[TOKEN],
            )
            for name, blocks in self.blocks.items()
        ]
        self._run(output, tokens=1, plan=self.first)
        return self

    def __exit__(self, *_: object) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self.blocks)
        self.runner.execute_model(output)

    def decode(self, plan: Plan) -> None:
        """Run a decode step that verifies a plan's number of drafts of each request, of
        which the step before made as many or more, and makes drafts by the plan.
        """
        drafts = plan.drafts
        names = list(self.blocks)
        output = SchedulerOutput.make_empty()
        if drafts:
            verified = {name: [TOKEN] * drafts for name in names}
            output.scheduled_spec_decode_tokens = verified
        cached = CachedRequestData.make_empty()
        cached.req_ids = names
        cached.new_block_ids = [None] * len(names)
        cached.num_computed_tokens = [self.emitted] * len(names)
        cached.num_output_tokens = [self.emitted] * len(names)
        output.scheduled_cached_reqs = cached
        self._run(output, tokens=1 + drafts, plan=plan)
        self.emitted += 1 + drafts

    def _run(self, output: SchedulerOutput, tokens: int, plan: Plan) -> None:
        """Run a step of so many tokens a request, which makes drafts by a plan."""
        output.num_scheduled_tokens = dict.fromkeys(self.blocks, tokens)
        output.total_num_scheduled_tokens = tokens * len(self.blocks)
        output.num_spec_tokens_to_schedule = plan.drafts
        setattr(output, STEP, Step(len(self.blocks), 0, None, plan))
        self.runner.execute_model(output)
        self.runner.sample_tokens(None)


def length_needed(plans: Sequence[Plan]) -> int:
    """Tokens that a request needs for STEPS steps with each plan, and for the drafts of
    the last.
    """
    emitted = sum(STEPS * (1 + plan.drafts) for plan in plans)
    return 2 + emitted + max(plans).drafts + 1


def blocks_per_request(runner: Any, plans: Sequence[Plan]) -> list[int]:
    """KV blocks of such a request in each KV cache group."""
    length = length_needed(plans)
    groups = runner.kv_cache_config.kv_cache_groups
    return [-(-length // group.kv_cache_spec.block_size) for group in groups]


def most_requests(runner: Any, plans: Sequence[Plan]) -> int:
    """The largest batch that can be timed; 0 if requests cannot be long enough."""
    if length_needed(plans) > runner.max_model_len:
        return 0
    scheduler = runner.scheduler_config
    blocks = sum(blocks_per_request(runner, plans))
    return min(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens // (1 + max(plans).drafts),
        (runner.kv_cache_config.num_blocks - 1) // blocks,
    )


def time_steps(runner: Any, requests: int, plans: Sequence[Plan]) -> list[float]:
    """Seconds of a decode step with each plan.

    Args:
        runner: vLLM's V2 model runner.
        requests: number of requests.
        plans: what steps draft.
    """
    seconds = {}
    runner.kv_connector.set_disabled(True)
    try:
        with DummyBatch(runner, requests, plans) as batch:
            for plan in sorted(plans, reverse=True):
                for _ in range(WARM):
                    batch.decode(plan)
                wait(runner)
                started = time.perf_counter()
                for _ in range(TIMED):
                    batch.decode(plan)
                wait(runner)
                seconds[plan] = (time.perf_counter() - started) / TIMED
    finally:
        runner.kv_connector.set_disabled(False)
    return [seconds[plan] for plan in plans]


def wait(runner: Any) -> None:
    """Wait for the device."""
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()
