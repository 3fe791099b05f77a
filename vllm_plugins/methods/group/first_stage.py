# SPDX-License-Identifier: Apache-2.0
"""The first stage (PPD's sub-processes), which starts the k likeliest next tokens while the last stage ends one."""

import copy
import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.host import buckets
from vllm_ppd.vllm_plugins.engine.lm_head import CopiedLMHead
from vllm_ppd.vllm_plugins.engine.v1.passes import Span
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, early_heads
from vllm_ppd.vllm_plugins.methods.group.candidates import NONE, Candidates
from vllm_ppd.vllm_plugins.methods.group.carried_states import CarriedStates
from vllm_ppd.vllm_plugins.methods.group.kv_blocks import KVBlocks
from vllm_ppd.vllm_plugins.methods.group.progress import Progress
from vllm_ppd.vllm_plugins.methods.group.stage import Stage

# Rows, the candidate of each whose token was right, and its index.
_NOTHING = tuple(np.zeros(0, dtype=np.int64) for _ in range(3))


class FirstStage(Stage):
    """Layers 0..d_bar, in two stacks where d_bar > d/2, with the early head and copies of norm and LM head."""

    def load_model(self, model: Any) -> None:
        config, vllm_config, device = self.config, self.vllm_config, self.runner.device
        dtype, hidden_size = vllm_config.model_config.dtype, vllm_config.model_config.hf_text_config.hidden_size
        early = config.num_layers - self.split  # candidates need no more layers before the last stage has chosen
        exits = (early,) if early < self.split else ()
        self.depth = min(early, self.split)  # of the first stack
        self.take(model, exits, (0, self.split))
        adapter = self.cut.adapter
        norm, shard, bias, place = self.channel.receive_weights()
        adapter.decoder.norm = copy.deepcopy(adapter.layers[0].input_layernorm)  # the final norm's kind and epsilon
        adapter.decoder.norm.weight.data = norm
        record_metadata_for_reloading(adapter.decoder.norm)  # vLLM loads every weight that the stage has, this one too
        self.lm_head = CopiedLMHead(*self._with_head(shard, bias, place.tolist()), vllm_config, device)
        self.reader = EarlyReader(adapter, self.lm_head, None)
        self.requests = min(config.disable_by_batch_size or 1, vllm_config.scheduler_config.max_num_seqs)
        # A row per request: the state after layer d_bar of the token that the last stage takes next.
        self.states = CarriedStates(self.requests, hidden_size, dtype, device, adapter.has_residual)
        blocks = KVBlocks(self.runner, lambda names: self.cut.attention_layers(0, names))
        self.candidates = Candidates(self.batch, blocks, config.candidates, self.requests)
        self._unsettled = _NOTHING

    def refresh(self) -> None:
        """Receive the target's norm and LM head again."""
        norm, shard, bias, place = self.channel.receive_weights()
        self.cut.adapter.decoder.norm.weight.data.copy_(norm)
        self.lm_head.load(*self._with_head(shard, bias, place.tolist())[:2])

    def _with_head(
        self, shard: torch.Tensor, bias: torch.Tensor, place: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """This rank's shard of the early head as one matrix, E* T or a classifier, read at the cost of E*.

        Args:
            shard, bias: of E*, [shard_size, hidden] and [shard_size].
            place: tokens of the vocabulary, the shard's first, and how many it holds.
        """
        heads = early_heads(self.config, shard.device, shard.dtype)
        if heads is None:
            return shard, bias, place
        weight = heads.weights[str(self.split)]
        if heads.form == "transform":
            return (shard.float() @ weight.float()).to(shard.dtype), bias, place
        _, first, count = place
        rows = functional.pad(weight[first : first + count], (0, 0, 0, len(shard) - count))
        return rows.to(shard.dtype), torch.zeros_like(bias), place

    @torch.inference_mode()
    def draft_for_dummies(self) -> None:
        """Read candidates once for each bucket of batch sizes, from states that are restored afterwards."""
        for requests in buckets(self.requests):
            rows = np.arange(requests)
            state = self.states.load(rows)
            self.states.store(rows, state)
            self.reader.candidates(self.split, state, self.candidates.count)

    def begin_step(self, scheduler_output: Any) -> Any:
        """Begin a step; carried states are valid only for a group step of the same requests that follows at once."""
        output = super().begin_step(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        if scheduler_output.scheduled_new_reqs or cached.resumed_req_ids or self._allowed is None:
            self.states.clear()
            self.candidates.forget()
        return output

    def carried(self) -> CutState | None:
        """The states of a group step's first tokens, if the previous step computed all of them; no layer runs then."""
        batch, base = self.batch, self.base_positions()
        count = batch.num_requests
        tokens = batch.token_ids[np.arange(count), base].astype(np.int64)
        state = self.states.of(batch.req_ids, base, tokens)
        if state is None:
            self.counters.add("group_first_stage_layers", count * self.split)
        return state

    @torch.inference_mode()
    def run_micro_steps(self, state: CutState) -> None:
        """Run the micro-steps after the first, whose states were sent to the last stage.

        Args:
            state: the first micro-step's states, a row per request of the batch; not overwritten.
        """
        assert self.allowance is not None
        started, waited = time.perf_counter(), self.channel.seconds_waited
        count = self.batch.num_requests
        self.states.clear()
        self.states.store(np.arange(count), state)
        progress = Progress(self.base_positions(), self.allowance, self.micro_steps, self.batch)
        sent = np.arange(count)
        for micro_step in range(self.micro_steps):
            if micro_step > 0:
                sent = self._next(progress)
                states = self.states.load(sent) if len(sent) else None  # no rows: the step ends
                self.channel.send_frame(sent, states, count, self.counters.take())
                if states is None:
                    break
            self.counters.add("group_micro_steps")
            self._micro_step(progress, sent)
        # The last misses would be the next step's first work; they run while the engine ends this step.
        self._run_missed(progress)
        self._settle_candidates()
        self._keep(progress)
        self.counters.add("group_first_stage_seconds", time.perf_counter() - started)
        self.counters.add("group_first_stage_idle_seconds", self.channel.seconds_waited - waited)

    def _next(self, progress: Progress) -> np.ndarray:
        """Rows of the next micro-step; the last stage waits while no request's token is ready."""
        sent = progress.sendable()
        if not len(sent) and progress.waits_for_missed():
            self._run_missed(progress)
            sent = progress.sendable()
        return sent

    def _micro_step(self, progress: Progress, sent: np.ndarray) -> None:
        """Run candidates for the next tokens, and missed tokens, while the last stage ends the sent ones."""
        self.channel.expect_tokens(len(progress.position))
        self._settle_candidates()
        speculating, k = progress.with_candidates(sent), self.candidates.count
        missed = np.flatnonzero(progress.missed)
        token_ids = np.zeros((len(speculating), k), dtype=np.int64)
        state = None
        if len(speculating) or len(missed):
            state, token_ids = self._run_candidates(progress, speculating, missed)
        tokens = self.channel.tokens()[sent]
        goes_on = np.zeros(len(progress.position), dtype=bool)
        goes_on[sent] = progress.emit(sent, tokens)

        hits = token_ids == progress.token[speculating, None]
        matched = hits.any(axis=1)
        right, computed = int(matched.sum()), len(speculating) * k
        self.counters.add("group_hits", right)
        self.counters.add("group_misses", len(speculating) - right)
        self.counters.add("group_candidates", computed)
        self.counters.add("group_candidates_discarded", computed - right)
        won = np.flatnonzero(matched & goes_on[speculating])
        winners, winning_candidate = speculating[won], hits.argmax(axis=1)[won]
        goes_on[winners] = False
        rows = np.concatenate([winners, missed])
        places = np.concatenate([won * k + winning_candidate, computed + np.arange(len(missed))])
        self._advance(progress, rows, state, places)
        progress.missed[goes_on] = True
        chosen = np.concatenate([winning_candidate, np.zeros(len(missed), dtype=np.int64)])
        self._unsettled = rows, chosen, progress.position[rows]

    def _run_candidates(
        self, progress: Progress, speculating: np.ndarray, missed: np.ndarray
    ) -> tuple[CutState, np.ndarray]:
        """The first stack over k candidates of some rows, and over the missed tokens of others.

        Returns:
            (states [len(speculating) * k + len(missed), hidden], candidates [len(speculating), k]).
        """
        k = self.candidates.count
        if len(speculating):
            token_ids = self.reader.candidates(self.split, self.states.load(speculating), k)
        else:
            token_ids = torch.zeros(0, k, dtype=torch.int64, device=self.runner.device)
        starts = progress.position[speculating] + 1
        self.candidates.prepare(speculating, starts)
        tails = self.candidates.tails_of(speculating)
        no_tails = np.full((len(missed), tails.shape[2]), NONE, dtype=np.int64)
        span = Span(
            np.concatenate([np.repeat(speculating, k), missed]),
            np.concatenate([np.repeat(starts, k), progress.position[missed]]),
            np.ones(len(speculating) * k + len(missed), dtype=np.int64),
            np.concatenate([tails.reshape(len(speculating) * k, tails.shape[2]), no_tails]),
        )
        ids = torch.cat([token_ids.flatten(), self.index(progress.token[missed])])
        self.counters.add("group_first_stage_layers", len(ids) * self.depth)
        return self.passes.first(span, ids), token_ids.cpu().numpy()

    def _run_missed(self, progress: Progress) -> None:
        """Run the missed tokens through the first stage."""
        missed = np.flatnonzero(progress.missed)
        if len(missed):
            self._settle_candidates()
            state, _ = self._run_candidates(progress, missed[:0], missed)
            self._advance(progress, missed, state, np.arange(len(missed)))
            self._unsettled = (missed, np.zeros(len(missed), dtype=np.int64), progress.position[missed])

    def _advance(self, progress: Progress, rows: np.ndarray, state: CutState | None, places: np.ndarray) -> None:
        """Run rows from the first stack's states, at some places, to d_bar."""
        if not len(rows):
            return
        assert state is not None
        index = self.index(places)
        state = state[0].index_select(0, index), None if state[1] is None else state[1].index_select(0, index)
        if len(self.cut.stacks) > 1:
            span = Span(rows, progress.position[rows], np.ones(len(rows), dtype=np.int64))
            state = self.passes.deeper(1, span, state)
            self.counters.add("group_first_stage_layers", len(rows) * (self.split - self.depth))
        self.states.store(rows, state)
        progress.ready[rows], progress.missed[rows] = True, False

    def _settle_candidates(self) -> None:
        """Copy the target's choice to all candidates, while the last stage computes."""
        rows, winners, positions = self._unsettled
        self.candidates.choose(rows, positions, winners)
        self._unsettled = _NOTHING

    def _keep(self, progress: Progress) -> None:
        """Keep the states for the next step, and append the emitted tokens to the batch."""
        batch, ready = self.batch, np.flatnonzero(progress.ready)
        self.states.carry(batch.req_ids, ready, progress.position[ready], progress.token[ready])
        for row, count in enumerate(progress.emitted.tolist()):
            batch.append(row, progress.tokens[row, :count].tolist())
