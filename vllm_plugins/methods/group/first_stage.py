# SPDX-License-Identifier: Apache-2.0
"""The first stage (PPD's sub-processes): it starts the k likeliest next tokens of each request."""

import copy
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.nn import functional
from vllm.distributed import get_pp_group
from vllm.model_executor.model_loader.reload.layerwise import (
    record_metadata_for_reloading,
)
from vllm.sequence import IntermediateTensors

from vllm_ppd.model_patches.base import CutState, ModelCut, rows_of
from vllm_ppd.vllm_plugins.engine.target import CopiedLMHead
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates
from vllm_ppd.vllm_plugins.methods.early.drafter import EarlyReader, early_heads
from vllm_ppd.vllm_plugins.methods.group.candidates import (
    NONE,
    Candidates,
    Progress,
)
from vllm_ppd.vllm_plugins.methods.group.stage import Stage


class FirstStageCut(ModelCut):
    """The cut stage; its forward returns states that were computed ahead, if there are any."""

    ahead: CutState | None = None  # of the step's tokens, until they are taken

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, *args: Any
    ) -> Any:
        if self.ahead is None:
            return super().forward(input_ids, positions, *args)
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
        exits = (self.depth,) if self.depth < self.split else ()
        self.take(model, exits, (0, self.split))
        self._load_reader()
        requests = min(
            config.disable_by_batch_size or 1,
            vllm_config.scheduler_config.max_num_seqs,
        )
        # By request row, the state after layer d_bar of the token that the last stage
        # takes next.
        rows = self.runner.max_num_reqs
        self.states = SavedStates(
            rows,
            vllm_config.model_config.hf_text_config.hidden_size,
            vllm_config.model_config.dtype,
            device,
            has_residual=True,
        )
        # By request row, the position of a state that the next step may use
        self.carried = np.full(rows, NONE)
        self.candidates = Candidates(self, config.candidates, requests)
        self._stops: dict[str, set[int]] = {}  # of requests by name
        # Arguments of Candidates.copy for written entries that the other candidates
        # of their requests do not have yet
        self._unsettled: tuple[ndarray, ...] | None = None

    def _load_reader(self) -> None:
        """Receive the target's norm and LM head, by which candidates are read."""
        weights: Any = get_pp_group().recv_tensor_dict()
        adapter = self.cut.adapter
        # The final norm's kind and epsilon are those of a layer's.
        norm: Any = copy.deepcopy(adapter.layers[0].input_layernorm)
        norm.weight.data = weights["norm"]
        adapter.decoder.norm = norm
        # vLLM loads every weight that the stage has, this one too
        record_metadata_for_reloading(norm)
        place = weights["place"].tolist()
        shard = weights["shard"]
        device = self.runner.device
        self.lm_head = CopiedLMHead(
            shard, weights["bias"], place, self.vllm_config, device
        )
        heads, _ = early_heads(self.config, device, shard.dtype)
        # A classifier is read in place of E*
        self.reads_target = heads is None or heads.form == "transform"
        if heads is not None and not self.reads_target:
            classifier = heads.weight(self.split).data
            no_bias = torch.zeros_like(weights["bias"])
            self.lm_head.load(self.lm_head.shard(classifier), no_bias)
            heads = None
        self.reader = EarlyReader(adapter, self.lm_head, heads)

    def refresh(self) -> None:
        weights: Any = get_pp_group().recv_tensor_dict()
        self.cut.adapter.decoder.norm.weight.data.copy_(weights["norm"])
        if self.reads_target:
            self.lm_head.load(weights["shard"], weights["bias"])
        # These states are of the former weights
        self.carried.fill(NONE)
        self.candidates.forget()

    # A step's forward -----------------------------------------------------------------

    def begin_step(self, scheduler_output: Any) -> Any:
        """Begin a step; states are carried only to a group step of the same requests."""
        output = super().begin_step(scheduler_output)
        for name in scheduler_output.finished_req_ids:
            self._stops.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            self._stops[new.req_id] = {
                params.eos_token_id,
                *(params.stop_token_ids or ()),
            }
        if scheduler_output.scheduled_new_reqs or self._allowed is None:
            self.carried.fill(NONE)
            self.candidates.forget()
        return output

    def begin_group_step(self, batch: Any) -> None:
        """Take the states of the first tokens if the previous step computed all of them."""
        super().begin_group_step(batch)
        step = self.step
        if step is None:
            return
        if (self.carried[step.request_rows] == step.positions).all():
            self.cut.ahead = self.states.load(self.index(step.request_rows))
        else:
            self.counters.add("group_first_stage_layers", step.size * self.split)

    def end_forward(self, output: Any) -> IntermediateTensors:
        """Keep the states of the first tokens, which are about to be sent."""
        assert self.step is not None
        state = output["hidden_states"], output["residual"]
        self.carried.fill(NONE)
        rows = self.index(self.step.request_rows)
        self.states.store(rows, rows_of(state, slice(len(rows))))
        if self.cut.graph_buffers is None:
            return output
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
        longest = self.runner.req_states.max_seq_len[step.request_rows]
        lengths = np.minimum(longest, self.runner.max_model_len)
        stops = [self._stops[name] for name in step.names]
        progress = Progress(step, lengths, stops)
        sent = np.arange(step.size)
        for micro_step in range(self.micro_steps):
            if micro_step > 0:
                sent = progress.allowed(progress.ready)
                if not len(sent) and len(progress.allowed(progress.missed)):
                    # The last stage waits while no request's token is ready
                    self._run_missed(progress)
                    sent = progress.allowed(progress.ready)
                # No rows: the step ends
                states = self._states_of(sent) if len(sent) else None
                counted = self.counters.take()
                self.channel.send_frame(sent, states, step.size, counted)
                if states is None:
                    break
            self.counters.add("group_micro_steps")
            self._micro_step(progress, sent)
        # The last misses would be the next step's first work; they run while the engine
        # ends this step.
        self._run_missed(progress)
        self._settle_candidates()
        ready = progress.ready
        self.carried[step.request_rows[ready]] = progress.position[ready]

    def _states_of(self, rows: ndarray) -> CutState:
        """The states of batch rows."""
        assert self.step is not None
        return self.states.load(self.index(self.step.request_rows[rows]))

    def _micro_step(self, progress: Progress, sent: ndarray) -> None:
        """Run candidates and missed tokens while the last stage ends the sent tokens."""
        self.channel.expect_tokens(len(progress.position))
        self._settle_candidates()
        # Rows whose next token cannot be their last
        ahead = progress.position[sent] + 2
        speculating = sent[ahead < progress.lengths[sent]]
        missed = np.flatnonzero(progress.missed)
        state, token_ids = self._run_candidates(progress, speculating, missed)
        goes_on = np.zeros(len(progress.position), dtype=bool)
        tokens = self.channel.tokens()
        goes_on[sent] = progress.emit(sent, tokens[sent])

        hits = token_ids == progress.token[speculating, None]
        matched = hits.any(axis=1)
        right = int(matched.sum())
        computed = token_ids.size
        self.counters.add("group_hits", right)
        self.counters.add("group_misses", len(speculating) - right)
        self.counters.add("group_candidates", computed)
        self.counters.add("group_candidates_discarded", computed - right)
        won = np.flatnonzero(matched & goes_on[speculating])
        winners = hits.argmax(axis=1)[won]
        goes_on[speculating[won]] = False
        rows = np.concatenate([speculating[won], missed])
        of_winners = won * self.candidates.count + winners
        of_missed = computed + np.arange(len(missed))
        places = np.concatenate([of_winners, of_missed])
        winners = np.concatenate([winners, np.zeros_like(missed)])
        self._advance(progress, rows, state, places, winners)
        progress.missed[goes_on] = True

    def _run_candidates(
        self, progress: Progress, speculating: ndarray, missed: ndarray
    ) -> tuple[CutState, ndarray]:
        """The first stack over k candidates of some rows, and over the missed tokens of
        others.

        Returns:
            (states [len(speculating) * k + len(missed), hidden], candidates
            [len(speculating), k]).
        """
        request_rows = progress.request_rows
        k = self.candidates.count
        if not len(speculating) and not len(missed):
            return self._states_of(missed), np.zeros((0, k), dtype=np.int64)
        token_ids = torch.zeros(
            0, k, dtype=torch.int64, device=self.runner.device
        )
        if len(speculating):
            state = self._states_of(speculating)
            token_ids = self.reader.candidates(self.split, state, k)
        starts = progress.position[speculating] + 1
        positions = progress.position[missed]
        of_candidates = speculating, request_rows[speculating], starts
        self.candidates.prepare(*of_candidates)
        blocks = [
            self.candidates.blocks(*of_candidates).flatten(0, 1),
            self.candidates.own(request_rows[missed], positions),
        ]
        missed_ids = self.index(progress.token[missed])
        ids = torch.cat([token_ids.flatten(), missed_ids])
        self.counters.add("group_first_stage_layers", len(ids) * self.depth)
        rows = np.concatenate([np.repeat(speculating, k), missed])
        state = self.passes.first(
            request_rows[rows],
            np.concatenate([np.repeat(starts, k), positions]),
            torch.cat(blocks),
            ids,
        )
        return state, token_ids.cpu().numpy()

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
        rows: ndarray,
        state: CutState,
        places: ndarray,
        winners: ndarray,
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
        state = rows_of(state, self.index(places))
        positions = progress.position[rows]
        request_rows = progress.request_rows[rows]
        if len(self.cut.stacks) > 1:
            state = self.passes.last(request_rows, positions, state)
            layers = len(rows) * (self.split - self.depth)
            self.counters.add("group_first_stage_layers", layers)
        self.states.store(self.index(request_rows), state)
        progress.ready[rows] = True
        progress.missed[rows] = False
        self._unsettled = rows, request_rows, positions, winners

    def _settle_candidates(self) -> None:
        """Copy the target's choice to all candidates, while the last stage computes."""
        if self._unsettled is not None:
            self.candidates.copy(*self._unsettled)
            self._unsettled = None
