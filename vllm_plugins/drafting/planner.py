# SPDX-License-Identifier: Apache-2.0
"""Which requests draft after a step, and how many tokens: length limits, batch cut-offs, opt-outs, what pays."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import DraftSources


class Plan(NamedTuple):
    """The requests whose base token goes through the shallow layers now."""

    rows: np.ndarray  # [requests] batch rows, ascending
    base_positions: np.ndarray  # [requests] position of the base token, the last one emitted
    base_tokens: np.ndarray  # [requests]
    max_drafts: np.ndarray  # [requests] 0 where only the base token is run, which the next step needs anyway
    looked_up: np.ndarray | None = None  # [requests, N] the drafts themselves, where the method is to make none


class Batch(Protocol):
    """What is read of vLLM's batch; arrays have a place a batch row."""

    max_model_len: int

    @property
    def num_requests(self) -> int: ...
    @property
    def req_ids(self) -> list[str]: ...
    @property
    def prompt_lengths(self) -> np.ndarray: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def token_ids(self) -> np.ndarray: ...


class Options(Protocol):
    """What is read of the requests' options; arrays have a place a request row."""

    drafting: np.ndarray
    is_greedy: np.ndarray
    max_tokens: np.ndarray


class DraftPlanner:
    """Plans a batch with arrays.

    Args:
        config: the server's options.
        batch: what is read of vLLM's batch.
        options: of the request rows.
        sources: takes drafts from the requests' own text where that is better (None: the method makes all).
    """

    def __init__(
        self, config: DraftingConfig, batch: Batch, options: Options, sources: DraftSources | None = None
    ) -> None:
        self.config = config
        self.batch, self.options = batch, options
        self.controller: DraftLengthController | None = None  # None: all drafts are made
        self.sources = sources
        self.forced: int | None = None  # drafts of every request while steps are timed
        self.all_emitted = False  # in the step that was planned last: no prompt was unfinished

    def plan(
        self, sampled_token_ids: list[list[int]], request_rows: np.ndarray, able: np.ndarray | None = None
    ) -> Plan | None:
        """The plan, or None if nobody drafts: then the next step is vLLM's own full forward.

        Args:
            sampled_token_ids: what each batch row emits in the step that ends.
            request_rows: [batch rows] the permanent row of each.
            able: as for allowed_drafts.
        """
        batch, config = self.batch, self.config
        counts = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=batch.num_requests)
        emitted = counts > 0
        self.all_emitted = bool(emitted.all())
        # A step emits a token beyond its accepted drafts, so drafting up to the limit would waste the last one.
        drafts, remaining = self.allowed_drafts(emitted, request_rows, able=able)
        emitting, looked_up, is_greedy = int(emitted.sum()), None, self.options.is_greedy[request_rows]
        if self.forced is not None:
            drafts = np.minimum(drafts, self.forced)
        elif self.sources is not None:
            self.sources.observe(batch.req_ids, counts)
            every, _ = self.allowed_drafts(emitted, request_rows, most=config.most_lookup_drafts)
            drafts, looked_up = self.sources.choose(batch, every, drafts, emitting, is_greedy)
        elif self.controller is not None:
            self.controller.observe(batch.req_ids, counts)
            drafts = self.controller.choose(drafts, emitting, is_greedy)
        if not drafts.any():
            return None
        rows = np.flatnonzero(emitted & (remaining > 0))
        base = batch.lengths[rows].astype(np.int64) - 1
        base_tokens = batch.token_ids[rows, base].astype(np.int64)
        return Plan(rows, base, base_tokens, drafts[rows], None if looked_up is None else looked_up[rows])

    def allowed_drafts(
        self,
        emitted: np.ndarray,
        request_rows: np.ndarray,
        able: np.ndarray | None = None,
        most: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many drafts each row of the batch may make; the last token of a request is never drafted.

        Args:
            emitted: [batch rows] bool, whether the row emits a token in this step.
            request_rows: [batch rows] the permanent row of each.
            able: [batch rows] bool, rows that the method can draft for (None: all).
            most: drafts of a request (None: the method's num_speculative_tokens).

        Returns:
            (drafts [batch rows], tokens that each row has left to its end [batch rows]).
        """
        batch, config, options = self.batch, self.config, self.options
        end = np.minimum(batch.prompt_lengths + options.max_tokens[request_rows], batch.max_model_len)
        remaining = end - batch.lengths.astype(np.int64)
        # Not np.clip, which takes ten times as long for a few numbers.
        drafts = np.minimum(np.maximum(remaining - 1, 0), most or config.num_speculative_tokens)
        drafts *= emitted & options.drafting[request_rows]
        if able is not None:
            drafts[~able] = 0
        if config.disable_by_batch_size is not None and batch.num_requests > config.disable_by_batch_size:
            drafts[:] = 0
        if config.max_drafting_requests is not None:
            drafts[np.cumsum(drafts > 0) > config.max_drafting_requests] = 0
        return drafts, remaining
