# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with room for a worker group's tokens per step, and one batch at a
time while it works.

A request that decodes in the group gets placeholder drafts: they reserve KV slots and
token budget, and tokens that the group emits beyond one count as accepted drafts. Above
the cut-off, and while any prompt is being read, it is vLLM's own scheduler.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.config.request_options import (
    request_options,
    sees_each_token,
)
from vllm_ppd.vllm_plugins.engine.scheduler import CountingScheduler

PLACEHOLDER = 0


class GroupScheduler(CountingScheduler):
    """Schedules small batches of decoding requests for several micro-steps a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = required_config(self.vllm_config, self)
        assert config.disable_by_batch_size is not None
        self.most_requests = config.disable_by_batch_size
        self.placeholders = config.num_speculative_tokens
        # vLLM pads a request with one token to compute, unless drafts depend on the
        # batch size. The grammar's masks would be padded as well, and the stages take
        # placeholders out again.
        self.dynamic_sd_lookup = [self.placeholders] * (
            self.max_num_running_reqs + 1
        )

    def has_requests(self) -> bool:
        # A second batch in flight would wait for the group, and its requests could
        # never join the first one's.
        in_flight = any(request.num_in_flight_tokens for request in self.running)
        return super().has_requests() and not (self._is_small() and in_flight)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        group_step = self._is_small() and self._all_decode()
        for request in self.running:
            request.spec_token_ids = (
                [PLACEHOLDER] * self._room(request) if group_step else []
            )
        return super().schedule(*args, **kwargs)

    def _is_small(self) -> bool:
        return sum(self.get_request_counts()) <= self.most_requests

    def _all_decode(self) -> bool:
        return self.get_request_counts()[1] == 0 and all(
            request.num_computed_tokens >= request.num_tokens - 1
            and not _needs_plain_steps(request.sampling_params)
            for request in self.running
        )

    def _room(self, request: Request) -> int:
        """Tokens that a request may emit beyond the first."""
        params: Any = request.sampling_params
        if sees_each_token(params):
            return 0
        options = request_options(params.extra_args)
        left = request.max_tokens - request.num_output_tokens - 1
        return max(0, min(options.most_drafts(self.placeholders), left))


def _needs_plain_steps(params: Any) -> bool:
    """Whether a request needs plain steps, for logprobs or a thinking budget."""
    return (
        params.num_logprobs is not None
        or params.thinking_token_budget is not None
    )
