# SPDX-License-Identifier: Apache-2.0
"""Who drafts after a step, and how many tokens: length limits, batch cut-offs, the per-request switch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.vllm_plugins.config import DraftingConfig
from vllm_ppd.vllm_plugins.request_switch import drafting_allowed


class Plan(NamedTuple):
    """The requests whose base token goes through the shallow layers now."""

    rows: np.ndarray  # [requests] batch rows, ascending
    base_positions: np.ndarray  # [requests] position of the base token, the last one emitted
    base_tokens: np.ndarray  # [requests]
    max_drafts: np.ndarray  # [requests] 0 where only the base token is run, which the next step needs anyway


class DraftPlanner:
    """Plans a batch with arrays; what is fixed for a request is looked up once, when the batch changes."""

    def __init__(self, config: DraftingConfig, runner: Any) -> None:
        self.config = config
        self.runner = runner
        self._req_ids: list[str] = []
        self._max_output = np.zeros(0, dtype=np.int64)
        self._allowed = np.zeros(0, dtype=bool)

    def plan(self, sampled_token_ids: list[list[int]]) -> Plan | None:
        """The plan, or None if nobody drafts: then the next step is vLLM's own full forward."""
        batch, config = self.runner.input_batch, self.config
        num_reqs = batch.num_reqs
        if config.disable_by_batch_size is not None and num_reqs > config.disable_by_batch_size:
            return None
        if self._req_ids != batch.req_ids:
            self._look_up(batch.req_ids)
        emitted = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=num_reqs) > 0
        num_tokens = batch.num_tokens_no_spec[:num_reqs].astype(np.int64)
        end = np.minimum(batch.num_prompt_tokens[:num_reqs] + self._max_output, self.runner.max_model_len)
        remaining = end - num_tokens
        running = emitted & (remaining > 0)
        # A step emits one token beyond its accepted drafts, so drafting up to the limit would waste the last one.
        drafts = np.clip(remaining - 1, 0, config.num_speculative_tokens) * (running & self._allowed)
        if config.max_drafting_requests is not None:
            drafts[np.cumsum(drafts > 0) > config.max_drafting_requests] = 0
        if not drafts.any():
            return None
        rows = np.flatnonzero(running)
        base = num_tokens[rows] - 1
        return Plan(rows, base, batch.token_ids_cpu[rows, base].astype(np.int64), drafts[rows])

    def forget(self) -> None:
        """Look every request up again: a name may have been given to another."""
        self._req_ids = []

    def _look_up(self, req_ids: list[str]) -> None:
        params = [self.runner.requests[req_id].sampling_params for req_id in req_ids]
        limits = [self.runner.max_model_len if p is None or p.max_tokens is None else p.max_tokens for p in params]
        self._max_output = np.array(limits, dtype=np.int64)
        self._allowed = np.array([drafting_allowed(getattr(p, "extra_args", None)) for p in params], dtype=bool)
        self._req_ids = list(req_ids)
