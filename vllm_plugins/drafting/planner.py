# SPDX-License-Identifier: Apache-2.0
"""Which requests draft after a step, and how many tokens: length limits, batch cut-offs, opt-outs, what pays."""

from typing import NamedTuple, Protocol

import numpy as np

from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import DraftSources, Lookup


class Plan(NamedTuple):
    """The requests whose base token goes through the shallow layers now."""

    rows: np.ndarray  # [requests] batch rows, ascending
    base_positions: np.ndarray  # [requests] position of the base token, which was emitted last
    base_tokens: np.ndarray  # [requests]
    max_drafts: np.ndarray  # [requests] 0 where only the base token runs, which the next step needs


class Batch(Protocol):
    """The facts about vLLM's batch that planning reads; arrays have an entry per batch row."""

    @property
    def max_model_len(self) -> int: ...
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
    """The requests' options that planning reads; arrays have an entry per request row."""

    drafting: np.ndarray
    thinking_budget: np.ndarray
    is_greedy: np.ndarray
    max_tokens: np.ndarray


class DraftPlanner:
    """Plans a batch with arrays.

    Args:
        config: the server's options.
        batch: facts about vLLM's batch.
        options: of the request rows.
        sources: chooses drafts from the requests' own texts if these are better (None: the method makes all).
    """

    def __init__(
        self, config: DraftingConfig, batch: Batch, options: Options, sources: DraftSources | None = None
    ) -> None:
        self.config = config
        self.batch, self.options = batch, options
        self.controller: DraftLengthController | None = None  # None: always all drafts
        self.sources = sources
        self.looked_up: Lookup | None = None  # drafts for the batch rows that the last plan omits
        self.any_allowed = False  # whether any request was allowed drafts, before the choice of their number
        self.forced: int | None = None  # drafts per request while steps are timed
        self.all_emitted = False  # whether no prompt was unfinished in the last planned step

    def plan(
        self, sampled_token_ids: list[list[int]], request_rows: np.ndarray, able: np.ndarray | None = None
    ) -> Plan | None:
        """The plan, or None if the method drafts for no request; looked_up has drafts of the rows that it leaves out.

        Args:
            sampled_token_ids: tokens that each batch row emits in the step that ends.
            request_rows: [batch rows] the permanent row of each.
            able: see allowed_drafts.
        """
        batch = self.batch
        counts = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=batch.num_requests)
        emitted = counts > 0
        self.all_emitted = bool(emitted.all())
        # A step emits a token beyond its accepted drafts, so drafting up to the limit would waste the last draft.
        drafts, remaining = self.allowed_drafts(emitted, request_rows, able=able)
        kinds, controller, self.looked_up = self.options.is_greedy[request_rows], self.controller, None
        if self.forced is not None:
            drafts = np.minimum(drafts, self.forced)
        else:
            if controller is not None:
                controller.observe(batch.req_ids, counts)
            if self.sources is not None:
                every, _ = self.allowed_drafts(emitted, request_rows)
                acceptance = None if controller is None else controller.acceptance
                self.looked_up, drafts, kinds = self.sources.choose(batch, every, drafts, kinds, acceptance)
            self.any_allowed = bool(drafts.any())
            if controller is not None:
                drafts = controller.choose(drafts, int(emitted.sum()), kinds)
        if self.looked_up is not None:
            taken = self.looked_up.counts > 0
            self.looked_up = self.looked_up._replace(counts=np.where(taken, drafts, 0))
            drafts, emitted = np.where(taken, 0, drafts), emitted & ~taken
        if not drafts.any():
            return None
        rows = np.flatnonzero(emitted & (remaining > 0))
        base = batch.lengths[rows].astype(np.int64) - 1
        base_tokens = batch.token_ids[rows, base].astype(np.int64)
        return Plan(rows, base, base_tokens, drafts[rows])

    def allowed_drafts(
        self,
        emitted: np.ndarray,
        request_rows: np.ndarray,
        able: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many drafts each row of the batch may make; the last token of a request is never drafted.

        Args:
            emitted: [batch rows] bool, whether the row emits a token in this step.
            request_rows: [batch rows] the permanent row of each.
            able: [batch rows] bool, rows that the method can draft for (None: all).

        Returns:
            (drafts [batch rows], remaining tokens of each row [batch rows]).
        """
        batch, config, options = self.batch, self.config, self.options
        end = np.minimum(batch.prompt_lengths + options.max_tokens[request_rows], batch.max_model_len)
        remaining = end - batch.lengths.astype(np.int64)
        # Not np.clip, which takes ten times as long for a few numbers.
        drafts = np.minimum(np.maximum(remaining - 1, 0), config.num_speculative_tokens)
        drafts *= emitted & options.drafting[request_rows]
        if able is not None:
            drafts[~able] = 0
        if options.thinking_budget[request_rows].any():
            # vLLM's V1 budgets count rejected drafts, and force the end of a thought in rows of other requests' drafts.
            drafts[:] = 0
        if config.disable_by_batch_size is not None and batch.num_requests > config.disable_by_batch_size:
            drafts[:] = 0
        if config.max_drafting_requests is not None:
            drafts[np.cumsum(drafts > 0) > config.max_drafting_requests] = 0
        return drafts, remaining
