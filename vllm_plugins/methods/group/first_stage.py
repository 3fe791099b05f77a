# SPDX-License-Identifier: Apache-2.0
"""The first stage (PPD's sub-processes): it starts the k likeliest next tokens of each request."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from vllm.distributed import get_pp_group
from vllm.model_executor.model_loader.reload.layerwise import (
    record_metadata_for_reloading,
)
from vllm.sequence import IntermediateTensors

from vllm_ppd.model_patches.base import CutState, ModelCut, rows_of
from vllm_ppd.vllm_plugins.engine.staging import batch_sizes
from vllm_ppd.vllm_plugins.engine.target import CopiedLMHead
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, early_heads
from vllm_ppd.vllm_plugins.methods.group.candidates import Candidates, KVBlocks
from vllm_ppd.vllm_plugins.methods.group.passes import NONE
from vllm_ppd.vllm_plugins.methods.group.progress import CarriedStates, End, Progress
from vllm_ppd.vllm_plugins.methods.group.stage import Stage


class Unsettled(NamedTuple):
    """Written entries that the other candidates of their requests do not have yet."""

    rows: np.ndarray  # [requests] batch rows
    positions: np.ndarray  # [requests]
    winners: np.ndarray  # [requests] the candidate with the right entry


class FirstStageCut(ModelCut):
    """The cut stage; its forward returns states that were computed ahead, if there are any."""

    ahead: CutState | None = None  # of the step's tokens, until they are taken

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | CutState:
        if self.ahead is None:
            return super().forward(input_ids, positions, state, inputs_embeds)
        hidden, residual = self.ahead
        self.ahead = None
        assert residual is not None
        padding = (0, 0, 0, len(positions) - len(hidden))
        return functional.pad(hidden, padding), functional.pad(residual, padding)


class FirstStage(Stage):
    """Layers 0..d_bar, with the early head and copies of the final norm and LM head.

    Candidates need no more than d - d_bar layers before the last stage has chosen.
    Where that is less than d_bar, the stage is cut into two stacks.
    """

    cut: FirstStageCut
    cut_class = FirstStageCut

    def load_model(self, model: Any) -> None:
        config = self.config
        vllm_config = self.vllm_config
        device = self.runner.device
        # Layers of the first stack
        self.depth = min(config.num_layers - self.split, self.split)
        self.take(
            model, (self.depth,) if self.depth < self.split else (), (0, self.split)
        )
        adapter = self.cut.adapter
        weights: Any = get_pp_group().recv_tensor_dict()
        # The final norm's kind and epsilon are those of a layer's.
        adapter.decoder.norm = copy.deepcopy(adapter.layers[0].input_layernorm)
        adapter.decoder.norm.weight.data = weights["norm"]
        # vLLM loads every weight that the stage has, this one too
        record_metadata_for_reloading(adapter.decoder.norm)
        head = self._with_head(
            weights["shard"], weights["bias"], weights["place"].tolist()
        )
        self.lm_head = CopiedLMHead(*head, vllm_config, device)
        self.reader = EarlyReader(adapter, self.lm_head, None)
        self.requests = min(
            config.disable_by_batch_size or 1, vllm_config.scheduler_config.max_num_seqs
        )
        # The state after layer d_bar of the token that the last stage takes next.
        saved = SavedStates(
            self.requests,
            vllm_config.model_config.hf_text_config.hidden_size,
            vllm_config.model_config.dtype,
            device,
            adapter.has_residual,
        )
        self.states = CarriedStates(saved)
        blocks = KVBlocks(
            self.runner, lambda names: self.cut.attention_layers(0, names)
        )
        self.candidates = Candidates(blocks, config.candidates, self.requests)
        self._ends: dict[str, End] = {}
        self._unsettled: Unsettled | None = None

    def refresh(self) -> None:
        """Receive the target's norm and LM head again."""
        weights: Any = get_pp_group().recv_tensor_dict()
        self.cut.adapter.decoder.norm.weight.data.copy_(weights["norm"])
        weight, bias, _ = self._with_head(
            weights["shard"], weights["bias"], weights["place"].tolist()
        )
        self.lm_head.load(weight, bias)

    def _with_head(
        self, shard: torch.Tensor, bias: torch.Tensor, place: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """This rank's shard of the early head as one matrix, read at the cost of E*.

        The head is E* T or a classifier.

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
        rows = functional.pad(
            weight[first : first + count], (0, 0, 0, len(shard) - count)
        )
        return rows.to(shard.dtype), torch.zeros_like(bias), place

    def reserve_blocks(self, kv_cache_config: Any) -> None:
        self.candidates.reserve(kv_cache_config)

    def warm_up_blocks(self) -> None:
        self.candidates.warm_up()

    @torch.inference_mode()
    def profile(self) -> None:
        """Read candidates once for each batch size to warm up."""
        for count in batch_sizes(self.requests):
            state = self.states.load(np.arange(count))
            self.reader.candidates(self.split, state, self.candidates.count)

    # A step's forward -----------------------------------------------------------------

    def begin_step(self, scheduler_output: Any) -> Any:
        """Begin a step; states are carried only to a group step of the same requests."""
        output = super().begin_step(scheduler_output)
        for name in scheduler_output.finished_req_ids:
            self._ends.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._ends[new.req_id] = End.of(new, self.runner.max_model_len)
        if scheduler_output.scheduled_new_reqs or self._allowed is None:
            self.states.clear()
            self.candidates.forget()
        return output

    def begin_group_step(self, batch: Any) -> None:
        """Take the states of the first tokens if the previous step computed all of them."""
        super().begin_group_step(batch)
        if self.step is not None:
            self.cut.ahead = self.states.of(self.step.names, self.step.positions)
            if self.cut.ahead is None:
                self.counters.add(
                    "group_first_stage_layers", self.step.size * self.split
                )

    def end_forward(self, output: Any) -> IntermediateTensors:
        """Keep the states of the first tokens, which are about to be sent."""
        assert self.step is not None
        state = output["hidden_states"], output["residual"]
        self.states.clear()
        self.states.store(
            np.arange(self.step.size), rows_of(state, slice(self.step.size))
        )
        if self.cut.graph_buffers is None:
            sent: IntermediateTensors = output
            return sent
        # The micro-steps replay CUDA graphs into the memory that vLLM sends from.
        return IntermediateTensors(
            {name: part.clone() for name, part in output.items()}
        )

    # Micro-steps ----------------------------------------------------------------------

    @torch.inference_mode()
    def run_micro_steps(self) -> None:
        """Run the micro-steps of a group step, whose first states were sent; none in a
        plain step.
        """
        step = self.step
        if step is None:
            return
        ends = [self._ends[name] for name in step.names]
        progress = Progress(step.positions, step.allowance, ends)
        sent = np.arange(step.size)
        for micro_step in range(self.micro_steps):
            if micro_step > 0:
                sent = self._next(progress)
                # No rows: the step ends
                states = self.states.load(sent) if len(sent) else None
                self.channel.send_frame(sent, states, step.size, self.counters.take())
                if states is None:
                    break
            self.counters.add("group_micro_steps")
            self._micro_step(progress, sent)
        # The last misses would be the next step's first work; they run while the engine
        # ends this step.
        self._run_missed(progress)
        self._settle_candidates()
        ready = np.flatnonzero(progress.ready)
        self.states.carry(step.names, ready, progress.position[ready])

    def _next(self, progress: Progress) -> np.ndarray:
        """Rows of the next micro-step; the last stage waits while no request's token is ready."""
        sent = progress.sendable()
        if not len(sent) and progress.waits_for_missed():
            self._run_missed(progress)
            sent = progress.sendable()
        return sent

    def _micro_step(self, progress: Progress, sent: np.ndarray) -> None:
        """Run candidates and missed tokens while the last stage ends the sent tokens."""
        self.channel.expect_tokens(len(progress.position))
        self._settle_candidates()
        speculating = progress.with_candidates(sent)
        missed = np.flatnonzero(progress.missed)
        k = self.candidates.count
        token_ids = np.zeros((len(speculating), k), dtype=np.int64)
        state = None
        if len(speculating) or len(missed):
            state, token_ids = self._run_candidates(progress, speculating, missed)
        goes_on = np.zeros(len(progress.position), dtype=bool)
        goes_on[sent] = progress.emit(sent, self.channel.tokens()[sent])

        hits = token_ids == progress.token[speculating, None]
        matched = hits.any(axis=1)
        right = int(matched.sum())
        computed = len(speculating) * k
        self.counters.add("group_hits", right)
        self.counters.add("group_misses", len(speculating) - right)
        self.counters.add("group_candidates", computed)
        self.counters.add("group_candidates_discarded", computed - right)
        won = np.flatnonzero(matched & goes_on[speculating])
        winners = hits.argmax(axis=1)[won]
        goes_on[speculating[won]] = False
        rows = np.concatenate([speculating[won], missed])
        places = np.concatenate([won * k + winners, computed + np.arange(len(missed))])
        winners = np.concatenate([winners, np.zeros(len(missed), dtype=np.int64)])
        self._advance(progress, rows, state, places, winners)
        progress.missed[goes_on] = True

    def _run_candidates(
        self, progress: Progress, speculating: np.ndarray, missed: np.ndarray
    ) -> tuple[CutState, np.ndarray]:
        """The first stack over k candidates of some rows, and over the missed tokens of
        others.

        Returns:
            (states [len(speculating) * k + len(missed), hidden], candidates
            [len(speculating), k]).
        """
        assert self.step is not None
        k = self.candidates.count
        token_ids = torch.zeros(0, k, dtype=torch.int64, device=self.runner.device)
        if len(speculating):
            token_ids = self.reader.candidates(
                self.split, self.states.load(speculating), k
            )
        starts = progress.position[speculating] + 1
        self.candidates.prepare(
            speculating, self.step.request_rows[speculating], starts
        )
        tails = self.candidates.tails_of(speculating)
        tails = tails.reshape(len(speculating) * k, tails.shape[2])
        tokens = self.tokens(
            np.concatenate([np.repeat(speculating, k), missed]),
            np.concatenate([np.repeat(starts, k), progress.position[missed]]),
            np.pad(tails, ((0, len(missed)), (0, 0)), constant_values=NONE),
        )
        ids = torch.cat([token_ids.flatten(), self.index(progress.token[missed])])
        self.counters.add("group_first_stage_layers", len(ids) * self.depth)
        return self.passes.first(tokens, ids), token_ids.cpu().numpy()

    def _run_missed(self, progress: Progress) -> None:
        """Run the missed tokens through the first stage."""
        missed = np.flatnonzero(progress.missed)
        if len(missed):
            self._settle_candidates()
            state, _ = self._run_candidates(progress, missed[:0], missed)
            places = np.arange(len(missed))
            self._advance(progress, missed, state, places, np.zeros_like(missed))

    def _advance(
        self,
        progress: Progress,
        rows: np.ndarray,
        state: CutState | None,
        places: np.ndarray,
        winners: np.ndarray,
    ) -> None:
        """Run rows from the first stack's states to d_bar.

        Args:
            rows: [tokens] batch rows.
            state: of all candidates and missed tokens that ran.
            places: [tokens] where each row's is among them.
            winners: [tokens] the candidate that was right; 0 for a missed token.
        """
        if not len(rows):
            return
        assert state is not None
        state = rows_of(state, self.index(places))
        positions = progress.position[rows]
        if len(self.cut.stacks) > 1:
            state = self.passes.last(self.tokens(rows, positions), state)
            layers = len(rows) * (self.split - self.depth)
            self.counters.add("group_first_stage_layers", layers)
        self.states.store(rows, state)
        progress.ready[rows] = True
        progress.missed[rows] = False
        self._unsettled = Unsettled(rows, positions, winners)

    def _settle_candidates(self) -> None:
        """Copy the target's choice to all candidates, while the last stage computes."""
        if self._unsettled is not None:
            assert self.step is not None
            rows, positions, winners = self._unsettled
            self.candidates.choose(
                rows, self.step.request_rows[rows], positions, winners
            )
            self._unsettled = None
