# SPDX-License-Identifier: Apache-2.0
"""Early drafting with deferred KV completion.

One engine step for every decoding request:

    deep pass     last stack over [b, d1..dn] from saved states -> logits, and the deep KV of all n+1 tokens
    verify        vLLM's rejection sampler accepts a prefix and adds the token b'
    shallow loop  first stack on b', read the exit -> d1'; first stack on d1', read -> d2'; ...; keep every state

so each deep weight is read once for n+1 tokens and no shallow work is done twice: n * l/L + 1 full passes a cycle.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.checkpoint import load_heads
from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.acceptance import AcceptanceWatch
from vllm_ppd.vllm_plugins.activation import active_config
from vllm_ppd.vllm_plugins.metrics import Counters
from vllm_ppd.vllm_plugins.passes import Span, StackPasses
from vllm_ppd.vllm_plugins.plan import DraftPlanner
from vllm_ppd.vllm_plugins.reader import EarlyReader, Reading
from vllm_ppd.vllm_plugins.states import SavedStates, flat_ranges


class EarlyProposer:
    """Drafts at exit layers of the target and completes the deferred KV in the next step.

    vLLM builds it with its configuration; the runner binds itself and then calls load_model once, forward for every
    step's model run and draft after every step's sampling.
    """

    runner: Any
    cut: ModelCut

    def __init__(self, vllm_config: Any) -> None:
        config = active_config(vllm_config)
        assert config is not None, "EarlyProposer is started by vllm-ppd's own configuration"
        self.vllm_config = vllm_config
        self.config = config
        self.counters = Counters(vllm_config.parallel_config)
        self.watch = AcceptanceWatch()
        self.probs: torch.Tensor | None = None

    def bind(self, runner: Any) -> None:
        """Take the model runner that will drive this proposer."""
        self.runner = runner
        self.planner = DraftPlanner(self.config, runner)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own interface, which lacks the hidden states; only our runner can drive this proposer."""
        raise RuntimeError("early drafting needs vllm-ppd's worker; remove --worker-cls")

    def load_model(self, model: Any) -> None:
        """Cut the loaded target and allocate everything, before vLLM measures the memory left for its KV cache."""
        config, vllm_config = self.config, self.vllm_config
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        device, dtype = self.runner.device, model_config.dtype
        hidden_size = model_config.hf_text_config.hidden_size
        self.cut = ModelCut(model, vllm_config, config.exit_layer)
        heads = None
        if config.model is not None:
            heads = load_heads(config.model)[1].to(device=device, dtype=dtype).requires_grad_(False)
        if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            self.cut.allocate_junction(scheduler.max_num_batched_tokens, hidden_size, dtype, device)
        self.reader = EarlyReader(model, self.cut.adapter, heads)
        self.passes = StackPasses(self.runner, self.cut)
        width = config.num_speculative_tokens + 1
        self.saved = SavedStates(
            scheduler.max_num_seqs, width, hidden_size, dtype, device, self.cut.adapter.has_residual
        )
        if config.draft_sample_method == "probabilistic":
            vocabulary = model_config.get_vocab_size()
            self.probs = torch.zeros(scheduler.max_num_seqs, width - 1, vocabulary, device=device)

    # ---- the step's forward: the deep pass alone where every scheduled token has a saved state

    def begin_step(self, scheduler_output: Any) -> None:
        """Forget the states if a request came back from preemption: its KV blocks are not those of its states."""
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.saved.clear()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The deep pass of the step: normed hidden states [tokens, hidden], or None for the full forward."""
        runner = self.runner
        num_reqs = runner.input_batch.num_reqs
        query_lens = np.diff(runner.query_start_loc.np[: num_reqs + 1]).astype(np.int64)
        first_positions = runner.input_batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        num_tokens = int(query_lens.sum())
        rows = self.saved.match(
            runner.input_batch.req_ids, first_positions, query_lens, runner.input_ids.np[:num_tokens]
        )
        if rows is None:
            self.counters.add("fallback_steps")
            self.saved.clear()
            return None
        self._complete_levels(rows, first_positions, query_lens)
        if positions.shape[0] > num_tokens:
            rows = np.pad(rows, (0, positions.shape[0] - num_tokens))  # graph padding; its output is not read
        state = self.cut.at_junction(self.saved.load(rows))
        self.counters.add("deferred_steps")
        self.saved.clear()
        return self.cut.stacks[-1](positions, *state)

    def _complete_levels(self, rows: np.ndarray, first_positions: np.ndarray, query_lens: np.ndarray) -> None:
        """Bring tokens that left at an earlier exit to the last one, a stack at a time."""
        request_of = np.repeat(np.arange(len(query_lens)), query_lens)
        for level in range(1, len(self.cut.stacks) - 1):
            waiting = self.saved.level.reshape(-1)[rows] == level
            if not waiting.any():
                continue
            # What waits is always the tail of a request: deeper reads take all its waiting tokens along.
            lengths = np.bincount(request_of[waiting], minlength=len(query_lens))
            requests = np.flatnonzero(lengths)
            starts = first_positions[requests] + query_lens[requests] - lengths[requests]
            state = self.passes.deeper(level, Span(requests, starts, lengths[requests]), self.saved.load(rows[waiting]))
            self.saved.store(rows[waiting], level + 1, *state)

    # ---- after sampling: the shallow loop

    @torch.inference_mode()
    def draft(
        self, sampled_token_ids: list[list[int]], num_draft_tokens: list[int] | None, sampling: Any
    ) -> list[list[int]]:
        """Draft for every decoding request of the batch.

        Args:
            sampled_token_ids: what the step emitted, a list a request; empty where the prompt is not done.
            num_draft_tokens: how many drafts of each request the step verified.
            sampling: the batch's SamplingMetadata.

        Returns:
            Draft token ids, a list a batch row; empty where a request does not draft.
        """
        started = time.perf_counter()
        self.watch.observe(sampled_token_ids, num_draft_tokens)
        self.saved.clear()
        num_reqs = self.runner.input_batch.num_reqs
        drafts: list[list[int]] = [[] for _ in range(num_reqs)]
        plan = self.planner.plan(sampled_token_ids)
        if plan is not None:
            tokens, made = self._shallow_loop(
                plan.rows, plan.base_positions, plan.base_tokens, plan.max_drafts, sampling
            )
            self.saved.req_ids = list(self.runner.input_batch.req_ids)
            self.saved.base_position[plan.rows] = plan.base_positions
            self.saved.tokens[plan.rows] = tokens
            self.saved.count[plan.rows] = made + 1
            for row, ids, count in zip(plan.rows.tolist(), tokens[:, 1:].tolist(), made.tolist(), strict=True):
                drafts[row] = ids[:count]
        self.counters.add("drafting_seconds", time.perf_counter() - started)
        return drafts

    def _shallow_loop(
        self,
        rows: np.ndarray,  # [requests] batch rows
        base: np.ndarray,  # [requests] positions of the base tokens
        base_tokens: np.ndarray,  # [requests]
        max_drafts: np.ndarray,  # [requests]
        sampling: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft until every request has its drafts or has stopped.

        Returns:
            (tokens [requests, n+1]: base token and drafts; drafts made [requests]).
        """
        device, width = self.runner.device, self.saved.width
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        tokens[:, 0] = torch.from_numpy(base_tokens).to(device, non_blocking=True)
        made = np.zeros(len(rows), dtype=np.int64)
        active = np.arange(len(rows))
        whole = True  # whether every request is still active: then no index is needed
        for offset in range(width):
            at = slice(None) if whole else torch.from_numpy(active).to(device, non_blocking=True)
            span = Span(rows[active], base[active] + offset, np.ones(len(active), dtype=np.int64))
            state = self.passes.first(span, tokens[at, offset])
            self.saved.store(span.rows * width + offset, 1, *state)
            reads = max_drafts[active] > offset
            if not reads.any():
                break
            if not reads.all():
                keep = torch.from_numpy(np.flatnonzero(reads)).to(device, non_blocking=True)
                state = state[0][keep], None if state[1] is None else state[1][keep]
                active, whole = active[reads], False
            reading = self._read(0, rows[active], offset, state, sampling)
            if self.config.gamma > 0:
                reading, confident = self._deepen(reading, rows[active], base[active], offset, sampling)
                self.counters.add("confidence_stops", int((~confident).sum()))
                if not confident.any():
                    break
                if not confident.all():
                    keep = torch.from_numpy(np.flatnonzero(confident)).to(device, non_blocking=True)
                    reading = Reading(
                        reading.token_ids[keep], None, None if reading.probs is None else reading.probs[keep]
                    )
                    active, whole = active[confident], False
            at = slice(None) if whole else torch.from_numpy(active).to(device, non_blocking=True)
            tokens[at, offset + 1] = reading.token_ids
            if self.probs is not None and reading.probs is not None:
                self.probs[torch.from_numpy(rows[active]).to(device, non_blocking=True), offset] = reading.probs
            made[active] = offset + 1
        return tokens.cpu().numpy(), made

    def _read(self, exit_index: int, rows: np.ndarray, offset: int, state: CutState, sampling: Any) -> Reading:
        exit_layer = self.cut.exit_layers[exit_index]
        if self.probs is None or sampling.all_greedy:
            return self.reader.greedy(exit_layer, state, with_confidence=self.config.gamma > 0)
        index = torch.from_numpy(rows).to(self.runner.device, non_blocking=True)
        seeded = np.isin(rows, list(sampling.generators))  # a seed promises the same output on every run
        return self.reader.sample(
            exit_layer, state, sampling.temperature[index], torch.from_numpy(seeded).to(self.runner.device)
        )

    def _deepen(
        self, reading: Reading, rows: np.ndarray, base: np.ndarray, offset: int, sampling: Any
    ) -> tuple[Reading, np.ndarray]:
        """Where confidence is not over gamma, go on to the next exit (if there is one) and read again.

        Returns:
            (the readings, which of them are confident [rows] bool).
        """
        assert reading.confidence is not None
        confident = (reading.confidence > self.config.gamma).cpu().numpy()
        width = self.saved.width
        for level in range(1, len(self.cut.exit_layers)):
            if confident.all():
                break
            unsure = np.flatnonzero(~confident)
            # Earlier tokens that left at this exit come along, so that attention at the next layers sees their KV.
            levels = self.saved.level[rows[unsure], : offset + 1]
            lengths = (levels == level).sum(axis=1)
            first = offset + 1 - lengths
            waiting = flat_ranges(rows[unsure] * width + first, lengths)
            span = Span(rows[unsure], base[unsure] + first, lengths)
            self.saved.store(waiting, level + 1, *self.passes.deeper(level, span, self.saved.load(waiting)))
            last = self.saved.load(rows[unsure] * width + offset)
            deeper = self._read(level, rows[unsure], offset, last, sampling)
            assert deeper.confidence is not None and reading.confidence is not None
            at = torch.from_numpy(unsure).to(self.runner.device)
            reading.token_ids[at] = deeper.token_ids
            reading.confidence[at] = deeper.confidence
            if reading.probs is not None and deeper.probs is not None:
                reading.probs[at] = deeper.probs
            confident = (reading.confidence > self.config.gamma).cpu().numpy()
        return reading, confident
