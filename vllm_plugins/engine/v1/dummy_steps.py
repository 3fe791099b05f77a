# SPDX-License-Identifier: Apache-2.0
"""Timed decode steps of dummy requests, run by vLLM's own model runner in an engine that serves nobody yet.

A step is all that the model runner does for it: inputs, forward pass, verification, drafting. The scheduler, the
detokenizer and the way between processes are left out; they take about the same with and without drafts, so relative
costs come out a little too high. Contexts are short: where attention over a long context is bound by memory, drafts
are relatively cheaper than measured, where it is bound by compute, dearer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_ppd.vllm_plugins.config.request_options import EPS_B

PROMPT = 4  # tokens
TOKEN = 1  # what prompts and looked-up drafts consist of


class DummyBatch:
    """Requests in an idle engine, scheduled as vLLM's scheduler would; gone when the context ends.

    Args:
        runner: vLLM's model runner, its KV cache allocated.
        requests: number of requests.
        length: most tokens of each, drafts included; see `most_requests`.
    """

    def __init__(self, runner: Any, requests: int, length: int) -> None:
        self.runner = runner
        self.names = [f"vllm-ppd dummy {i}" for i in range(requests)]
        self._emitted = [0] * requests
        numbers = itertools.count(1)  # block 0 is vLLM's null block
        self._blocks = [
            tuple([next(numbers) for _ in range(count)] for count in blocks_per_request(runner, length))
            for _ in range(requests)
        ]

    def __enter__(self) -> Self:
        at_once = max(1, self.runner.scheduler_config.max_num_batched_tokens // PROMPT)
        # As most sampling requests: greedy ones verify a little faster. No draft is left out for lack of confidence.
        params = SamplingParams(temperature=1.0, max_tokens=self.runner.max_model_len, extra_args={EPS_B: 0.0})
        for start in range(0, len(self.names), at_once):
            output = SchedulerOutput.make_empty()
            # The runner hears of the end of an idle engine's last requests with the next step.
            output.finished_req_ids = set(self.runner.requests) - set(self.names)
            output.scheduled_new_reqs = [
                NewRequestData(
                    req_id=self.names[i],
                    prompt_token_ids=[TOKEN] * PROMPT,
                    mm_features=[],
                    sampling_params=params,
                    pooling_params=None,
                    block_ids=self._blocks[i],
                    num_computed_tokens=0,
                    lora_request=None,
                )
                for i in range(start, min(start + at_once, len(self.names)))
            ]
            self._run(output, {new.req_id: PROMPT for new in output.scheduled_new_reqs})
        return self

    def __exit__(self, *_: object) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self.names)
        self.runner.execute_model(output)

    def step(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Run a decode step.

        Args:
            drafts: of each request, which the step verifies.

        Returns:
            Drafts of each request for the next step, by the engine's drafter.
        """
        output = SchedulerOutput.make_empty()
        output.scheduled_spec_decode_tokens = {
            name: list(ids) for name, ids in zip(self.names, drafts, strict=True) if ids
        }
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(self.names)
        cached.new_block_ids = [None] * len(self.names)
        cached.num_computed_tokens = [PROMPT + emitted - 1 for emitted in self._emitted]
        cached.num_output_tokens = list(self._emitted)
        output.scheduled_cached_reqs = cached
        return self._run(output, {name: 1 + len(ids) for name, ids in zip(self.names, drafts, strict=True)})

    def _run(self, output: SchedulerOutput, tokens: dict[str, int]) -> list[list[int]]:
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = tokens, sum(tokens.values())
        self.runner.execute_model(output)
        result = self.runner.sample_tokens(None)
        for i, name in enumerate(self.names):
            if name in result.req_id_to_index:
                self._emitted[i] += len(result.sampled_token_ids[result.req_id_to_index[name]])
        made = self.runner.take_draft_token_ids()
        drafts_of = {} if made is None else dict(zip(made.req_ids, made.draft_token_ids, strict=True))
        return [drafts_of.get(name, []) for name in self.names]


def blocks_per_request(runner: Any, length: int) -> list[int]:
    """KV blocks that a request of so many tokens takes in each KV cache group."""
    sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
    return [-(-length // size) for size in sizes]


def length_needed(counts: Sequence[int]) -> int:
    """Tokens of a request in `time_steps`, with room behind them for as many as are drafted at once."""
    return PROMPT + 1 + sum(2 * (1 + count) for count in counts) + max(counts) + 1


def most_requests(runner: Any, counts: Sequence[int]) -> int:
    """The largest batch that `time_steps` can run; 0 if requests cannot be as long as it takes."""
    scheduler, length = runner.scheduler_config, length_needed(counts)
    if length > runner.max_model_len:
        return 0
    blocks = sum(blocks_per_request(runner, length))
    return min(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens // (1 + max(counts)),
        (runner.kv_cache_config.num_blocks - 1) // max(blocks, 1),
    )


def time_steps(drafter: Any, looked_up: bool, requests: int, counts: Sequence[int]) -> list[float]:
    """Seconds of a decode step with each number of drafts per request, once each.

    Args:
        drafter: our proposer, bound to the runner.
        looked_up: whether the drafts are not the method's own, and the method makes none.
        requests: number of requests.
        counts: numbers of drafts, 0 among them.
    """
    planner, seconds = drafter.planner, {}
    most = drafter.config.max_drafting_requests or requests
    with DummyBatch(drafter.runner, requests, length_needed(counts)) as batch:
        drafts: list[list[int]] = [[] for _ in batch.names]
        # None last: DynaMo's requests do not draft again after such a step.
        for count in sorted(counts, reverse=True):
            planner.forced = 0 if looked_up else count
            for again in (False, True):  # the first of two steps verifies another number of drafts than it makes
                if looked_up or again:  # of the method's own drafts, DynaMo may have backed off to fewer
                    made = [[] for _ in batch.names] if looked_up else drafts
                    drafts = [[*ids, *[TOKEN] * count][:count] if i < most else [] for i, ids in enumerate(made)]
                if again and count == 0 and planner.sources is None:
                    drafter.bypass.begin(1, batch.names)
                started = time.perf_counter()
                drafts = batch.step(drafts)
                seconds[count] = time.perf_counter() - started
    planner.forced = None
    return [seconds[count] for count in counts]
