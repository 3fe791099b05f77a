# SPDX-License-Identifier: Apache-2.0
"""Requests by their permanent rows: what they ask of drafting, and on runner V1 the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import GREEDY_BELOW
from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, drafting_allowed, needs_single_tokens


class RequestOptions:
    """Options of every request row, as arrays of the host, some of which the device has a copy of.

    A seed promises the same output on every run, and drafts are drawn from a generator that requests share. A grammar
    cuts drafts off by what was drawn, after which q(x) is not what they were drawn from. Such requests draft greedily.

    Args:
        rows: request rows of the runner. The device has another, which the padding of CUDA graphs reads, row -1.
        device: where drafts are made.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.drafting = np.zeros(rows, dtype=bool)  # False where the request opted out
        self.drafts_greedily = np.zeros(rows, dtype=bool)  # at any temperature
        self.is_greedy = np.zeros(rows, dtype=bool)  # the request itself
        self.several_at_once = np.zeros(rows, dtype=bool)  # may be given unverified n-grams
        self.max_tokens = np.zeros(rows, dtype=np.int64)
        self.eps_b = np.full(rows, np.nan, dtype=np.float32)  # NaN where the request has no threshold
        self.on_device = {
            name: torch.zeros(rows + 1, dtype=dtype, device=device)
            for name, dtype in (("drafting", torch.bool), ("drafts_greedily", torch.bool), ("eps_b", torch.float32))
        }

    def add(self, row: int, params: Any) -> None:
        """Take a request in.

        Args:
            row: of the request.
            params: vLLM's SamplingParams; None for a pooling request.
        """
        extra = getattr(params, "extra_args", None)
        threshold = back_off_threshold(extra)
        self.drafting[row] = drafting_allowed(extra)
        self.drafts_greedily[row] = params is not None and (params.seed is not None or bool(params.structured_outputs))
        self.is_greedy[row] = params is None or params.temperature < GREEDY_BELOW
        self.several_at_once[row] = not needs_single_tokens(params)
        limit = getattr(params, "max_tokens", None)
        self.max_tokens[row] = np.iinfo(np.int32).max if limit is None else limit
        self.eps_b[row] = np.nan if threshold is None else threshold

    def apply(self) -> None:
        """Bring what was added to the device, in the order of its stream."""
        for name, values in self.on_device.items():
            async_tensor_h2d(getattr(self, name), out=values[:-1])


class RequestRows:
    """A row a running request, from its first step to its end or preemption.

    Args:
        rows: the most requests that run at once.
    """

    def __init__(self, rows: int) -> None:
        self.names = [""] * rows  # request of each row
        self._row_of: dict[str, int] = {}
        self._free = list(reversed(range(rows)))

    def begin_step(self, scheduler_output: Any) -> list[str]:
        """Take in who left and who came; returns the requests that are new or resumed, whose rows are new."""
        left = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        came = [*(request.req_id for request in scheduler_output.scheduled_new_reqs), *resumed]
        for name in (*left, *came):
            row = self._row_of.pop(name, None)
            if row is not None:
                self.names[row] = ""
                self._free.append(row)
        for name in came:
            row = self._free.pop()
            self._row_of[name], self.names[row] = row, name
        return came

    def of(self, names: Iterable[str]) -> np.ndarray:
        """The rows of requests: [requests] int64."""
        return np.array([self._row_of[name] for name in names], dtype=np.int64)
