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
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

PROMPT = 4  # tokens
TOKEN = 1  # the token of prompts and looked-up drafts


class DummyBatch:
    """Requests in an idle engine, scheduled as vLLM's scheduler would, and removed when
    the context ends.

    Drafts stay on the device, and the host does not wait for tokens.

    Args:
        runner: vLLM's model runner, its KV cache allocated.
        requests: number of requests.
        length: most tokens of each, drafts included; see `most_requests`.
    """

    drafts = 0  # to make after the next step

    def __init__(self, runner: Any, requests: int, length: int) -> None:
        self.runner = runner
        self.names = [f"vllm-ppd dummy {i}" for i in range(requests)]
        self.emitted = [0] * requests
        numbers = itertools.count(1)  # block 0 is vLLM's null block
        self._blocks = [
            tuple(
                [next(numbers) for _ in range(count)]
                for count in blocks_per_request(runner, length)
            )
            for _ in range(requests)
        ]

    def __enter__(self) -> Self:
        at_once = max(1, self.runner.scheduler_config.max_num_batched_tokens // PROMPT)
        # Sampled, as greedy requests verify slightly faster. No draft is dropped for
        # lack of confidence.
        params = SamplingParams(
            temperature=1.0,
            max_tokens=self.runner.max_model_len,
            extra_args={"ppd_eps_b": 0.0},
        )
        for start in range(0, len(self.names), at_once):
            output = SchedulerOutput.make_empty()
            # The runner learns with the next step that an idle engine's last requests
            # have ended.
            output.finished_req_ids = set(self.runner.req_states.req_id_to_index) - set(
                self.names
            )
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
                    prefill_token_ids=[TOKEN] * PROMPT,
                )
                for i in range(start, min(start + at_once, len(self.names)))
            ]
            self._run(output, {new.req_id: PROMPT for new in output.scheduled_new_reqs})
        return self

    def __exit__(self, *_: object) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self.names)
        self.runner.execute_model(output)

    def decode(self, drafts: Sequence[Sequence[int]]) -> None:
        """Run a decode step that verifies drafts of each request."""
        output = SchedulerOutput.make_empty()
        output.scheduled_spec_decode_tokens = {
            name: list(ids) for name, ids in zip(self.names, drafts, strict=True) if ids
        }
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(self.names)
        cached.new_block_ids = [None] * len(self.names)
        cached.num_computed_tokens = [PROMPT + emitted - 1 for emitted in self.emitted]
        cached.num_output_tokens = list(self.emitted)
        output.scheduled_cached_reqs = cached
        self._run(
            output,
            {name: 1 + len(ids) for name, ids in zip(self.names, drafts, strict=True)},
        )

    def _run(self, output: SchedulerOutput, tokens: dict[str, int]) -> None:
        output.num_scheduled_tokens = tokens
        output.total_num_scheduled_tokens = sum(tokens.values())
        output.num_spec_tokens_to_schedule = self.drafts
        self.runner.execute_model(output)
        self.runner.sample_tokens(None)
        self.emitted = [
            emitted + tokens.get(name, 0)
            for name, emitted in zip(self.names, self.emitted, strict=True)
        ]


def blocks_per_request(runner: Any, length: int) -> list[int]:
    """KV blocks of a request with a number of tokens in each KV cache group."""
    sizes = [
        group.kv_cache_spec.block_size
        for group in runner.kv_cache_config.kv_cache_groups
    ]
    return [-(-length // size) for size in sizes]


def length_needed(counts: Sequence[int], steps: int) -> int:
    """Tokens that a request needs for `steps` steps with each number of drafts, and for
    the drafts of the last.
    """
    return PROMPT + 1 + sum(steps * (1 + count) for count in counts) + max(counts) + 1


def most_requests(runner: Any, counts: Sequence[int], steps: int) -> int:
    """The largest batch for which a number of steps can run; 0 if requests cannot be
    long enough.
    """
    scheduler = runner.scheduler_config
    length = length_needed(counts, steps)
    if length > runner.max_model_len:
        return 0
    blocks = sum(blocks_per_request(runner, length))
    return min(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens // (1 + max(counts)),
        (runner.kv_cache_config.num_blocks - 1) // max(blocks, 1),
    )


# Steps with each number of drafts
WARM = 2
TIMED = 8
STEPS = WARM + TIMED


def time_steps(runner: Any, requests: int, counts: Sequence[int]) -> list[float]:
    """Seconds of a decode step with each number of drafts per request.

    Args:
        runner: vLLM's V2 model runner.
        requests: number of requests.
        counts: numbers of drafts.
    """
    seconds = {}
    runner.kv_connector.set_disabled(True)
    try:
        with DummyBatch(runner, requests, length_needed(counts, STEPS)) as batch:
            # A first step verifies the drafts of the number before it, of which there
            # must be enough.
            for count in sorted(counts, reverse=True):
                batch.drafts = count
                drafts = [[TOKEN] * count] * requests
                for _ in range(WARM):
                    batch.decode(drafts)
                wait(runner)
                started = time.perf_counter()
                for _ in range(TIMED):
                    batch.decode(drafts)
                wait(runner)
                seconds[count] = (time.perf_counter() - started) / TIMED
    finally:
        runner.kv_connector.set_disabled(False)
    return [seconds[count] for count in counts]


def wait(runner: Any) -> None:
    """Wait for the device."""
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()
