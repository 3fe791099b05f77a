# SPDX-License-Identifier: Apache-2.0
"""Requests by their permanent rows: their options for drafting, and on runner V1 the rows themselves."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import GREEDY_BELOW, Sampling
from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, drafting_allowed, needs_single_tokens


class Setting(IntEnum):
    """Columns of a request's settings that drafting reads on the device."""

    MAX_DRAFTS = 0
    TEMPERATURE = 1
    DRAFT_TEMPERATURE = 2  # 0 if drafts must be greedy
    TOP_K = 3
    TOP_P = 4
    EPS_B = 5


class RequestOptions:
    """Options of every request row, as arrays on the host and as a table on the device.

    If verification reads q(x), some requests draft greedily: a grammar cuts drafts off depending on their tokens, after
    which q(x) is no longer their distribution, and a seed promises the same output on every run, while drafts are
    drawn from a generator that requests share.

    Args:
        rows: request rows of the runner. The device has one more, row -1, which the padding of CUDA graphs reads.
        num_drafts: K.
        vocab_size: of the target.
        device: on which drafts are made.
        keyed: whether drafts are drawn with the target's own random numbers, so that output does not depend on them.
        verified: whether drafts are verified; if not, requests that need one token at a time have none.
    """

    def __init__(
        self,
        rows: int,
        num_drafts: int,
        vocab_size: int,
        device: torch.device,
        keyed: bool = False,
        verified: bool = True,
    ) -> None:
        self.num_drafts, self.vocab_size, self.keyed = num_drafts, vocab_size, keyed
        self.verified = verified
        self.drafting = np.zeros(rows, dtype=bool)  # False if the request has no drafts
        self.is_greedy = np.zeros(rows, dtype=bool)
        self.thinking_budget = np.zeros(rows, dtype=bool)  # whether the request has one
        self.max_tokens = np.zeros(rows, dtype=np.int64)
        # Exact in float32: drafts, temperatures, a top-k below 2^24, and NaN for no threshold.
        self.settings = np.zeros((rows, len(Setting)), dtype=np.float32)
        self.on_device = torch.zeros(rows + 1, len(Setting), device=device)

    def add(self, row: int, params: Any) -> None:
        """Add a request.

        Args:
            row: of the request.
            params: vLLM's SamplingParams; None for a pooling request.
        """
        extra = getattr(params, "extra_args", None)
        threshold = back_off_threshold(extra)
        self.drafting[row] = drafting_allowed(extra) and (self.verified or not needs_single_tokens(params))
        self.thinking_budget[row] = getattr(params, "thinking_token_budget", None) is not None
        self.is_greedy[row] = params is None or params.temperature < GREEDY_BELOW
        limit = getattr(params, "max_tokens", None)
        self.max_tokens[row] = np.iinfo(np.int32).max if limit is None else limit
        alone = params is not None and (params.seed is not None or bool(params.structured_outputs))
        greedily = self.is_greedy[row] or (alone and not self.keyed)
        temperature = 0.0 if self.is_greedy[row] else params.temperature
        top_k = self.vocab_size if params is None or not 0 < params.top_k < self.vocab_size else params.top_k
        self.settings[row] = (
            self.num_drafts if self.drafting[row] else 0,
            temperature,
            0.0 if greedily else temperature,
            top_k,
            1.0 if params is None else params.top_p,
            np.nan if threshold is None else threshold,
        )

    def apply(self) -> None:
        """Copy added options to the device in stream order, so that steps in flight read those they began with."""
        async_tensor_h2d(self.settings, out=self.on_device[:-1])

    def sampling(self, rows: np.ndarray, temperature: Setting = Setting.DRAFT_TEMPERATURE) -> Sampling:
        """The sampling parameters of some requests.

        Args:
            rows: [requests] request rows.
            temperature: TEMPERATURE or DRAFT_TEMPERATURE.
        """
        limited = (self.settings[rows, Setting.TOP_K] < self.vocab_size) | (self.settings[rows, Setting.TOP_P] < 1)
        settings = self.on_device[async_tensor_h2d(rows, device=self.on_device.device)].T
        limits = (settings[Setting.TOP_K], settings[Setting.TOP_P]) if limited.any() else ()
        return Sampling(settings[temperature], *limits)


class RequestRows:
    """A row for each running request, from its first step to its end or preemption.

    Args:
        rows: the most requests that run at once.
    """

    def __init__(self, rows: int) -> None:
        self.names = [""] * rows  # request of each row
        self._row_of: dict[str, int] = {}
        self._free = list(reversed(range(rows)))

    def begin_step(self, scheduler_output: Any) -> list[str]:
        """Update the rows for requests that ended or came; returns the new and resumed ones, which have new rows."""
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
