# SPDX-License-Identifier: Apache-2.0
"""Which requests draft after a step, and how many tokens: length limits, batch cut-offs, opt-outs, what pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, drafting_allowed, one_token_at_a_time
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import DraftSources

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.engine.v1.batch import Batch

GREEDY_BELOW = 1e-5  # temperature, as vLLM has it


class Plan(NamedTuple):
    """The requests whose base token goes through the shallow layers now."""

    rows: np.ndarray  # [requests] batch rows, ascending
    base_positions: np.ndarray  # [requests] position of the base token, the last one emitted
    base_tokens: np.ndarray  # [requests]
    max_drafts: np.ndarray  # [requests] 0 where only the base token is run, which the next step needs anyway
    looked_up: np.ndarray | None = None  # [requests, N] the drafts themselves, where the method is to make none


class DraftPlanner:
    """Plans a batch with arrays; what is fixed for a request is looked up once, when the batch changes.

    Args:
        config: the server's options.
        batch: what is read of vLLM's batch.
        sources: takes drafts from the requests' own text where that is better (None: the method makes all).
    """

    def __init__(self, config: DraftingConfig, batch: Batch, sources: DraftSources | None = None) -> None:
        self.config = config
        self.batch = batch
        self.controller: DraftLengthController | None = None  # None: all drafts are made
        self.sources = sources
        self.forced: int | None = None  # drafts of every request while steps are timed
        self._req_ids: list[str] = []
        self.all_emitted = False  # in the step that was planned last: no prompt was unfinished
        self._max_output = np.zeros(0, dtype=np.int64)
        self._allowed = np.zeros(0, dtype=bool)
        self._greedy = np.zeros(0, dtype=bool)
        self.structured = np.zeros(0, dtype=bool)  # [batch rows] what they say follows a grammar
        self.several_at_once = np.zeros(0, dtype=bool)  # [batch rows] may be given unverified n-grams
        # Options of a request that drafters read, by name: [batch rows], NaN where it has none.
        self.request_options: dict[str, np.ndarray] = {}

    def plan(self, sampled_token_ids: list[list[int]], able: np.ndarray | None = None) -> Plan | None:
        """The plan, or None if nobody drafts: then the next step is vLLM's own full forward.

        Args:
            sampled_token_ids: what each batch row emits in the step that ends.
            able: as for most_drafts.
        """
        batch, config = self.batch, self.config
        counts = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=batch.num_requests)
        emitted = counts > 0
        self.all_emitted = bool(emitted.all())
        # A step emits one token beyond its accepted drafts, so drafting up to the limit would waste the last one.
        drafts, remaining = self.most_drafts(emitted, reserved=1, able=able)
        emitting, looked_up = int(emitted.sum()), None
        if self.forced is not None:
            drafts = np.minimum(drafts, self.forced)
        elif self.sources is not None:
            self.sources.observe(batch.req_ids, counts)
            every, _ = self.most_drafts(emitted, reserved=1, most=config.most_lookup_drafts)
            drafts, looked_up = self.sources.choose(batch, every, drafts, emitting, self._greedy)
        elif self.controller is not None:
            self.controller.observe(batch.req_ids, counts)
            drafts = self.controller.choose(drafts, emitting, self._greedy)
        if not drafts.any():
            return None
        rows = np.flatnonzero(emitted & (remaining > 0))
        base = batch.lengths[rows].astype(np.int64) - 1
        base_tokens = batch.token_ids[rows, base].astype(np.int64)
        return Plan(rows, base, base_tokens, drafts[rows], None if looked_up is None else looked_up[rows])

    def most_drafts(
        self, emitted: np.ndarray, reserved: int, able: np.ndarray | None = None, most: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many drafts each row of the batch may make.

        Args:
            emitted: [batch rows] bool, whether the row emits a token in this step.
            reserved: tokens up to a request's end that are not to be drafted.
            able: [batch rows] bool, rows that the method can draft for (None: all).
            most: drafts of a request (None: the method's num_speculative_tokens).

        Returns:
            (drafts [batch rows], tokens that each row has left to its end [batch rows]).
        """
        batch, config = self.batch, self.config
        self._look_up_changed()
        end = np.minimum(batch.prompt_lengths + self._max_output, batch.max_model_len)
        remaining = end - batch.lengths.astype(np.int64)
        # Not np.clip, which takes ten times as long for a few numbers.
        drafts = np.minimum(np.maximum(remaining - reserved, 0), most or config.num_speculative_tokens)
        drafts *= emitted & self._allowed
        if able is not None:
            drafts[~able] = 0
        if config.disable_by_batch_size is not None and batch.num_requests > config.disable_by_batch_size:
            drafts[:] = 0
        if config.max_drafting_requests is not None:
            drafts[np.cumsum(drafts > 0) > config.max_drafting_requests] = 0
        return drafts, remaining

    def forget(self) -> None:
        """Look every request up again: a name may have been given to another."""
        self._req_ids = []

    def _look_up_changed(self) -> None:
        req_ids = self.batch.req_ids
        if self._req_ids != req_ids:
            self._look_up(req_ids)

    def _look_up(self, req_ids: list[str]) -> None:
        params = self.batch.sampling_params
        limits = [self.batch.max_model_len if p is None or p.max_tokens is None else p.max_tokens for p in params]
        self._max_output = np.array(limits, dtype=np.int64)
        extra = [getattr(p, "extra_args", None) for p in params]
        self._allowed = np.array([drafting_allowed(args) for args in extra], dtype=bool)
        self._greedy = np.array([p is None or p.temperature < GREEDY_BELOW for p in params], dtype=bool)
        self.structured = np.array([p is not None and p.structured_outputs is not None for p in params], dtype=bool)
        self.several_at_once = np.array([not one_token_at_a_time(p) for p in params], dtype=bool)
        thresholds = [back_off_threshold(args) for args in extra]
        self.request_options = {"eps_b": np.array([np.nan if eps is None else eps for eps in thresholds])}
        self._req_ids = list(req_ids)
