# SPDX-License-Identifier: Apache-2.0
"""A drafting method as a speculator of vLLM's runner V2: the adapter between vLLM's batch and the drafting host.

Every request of a step is given K draft IDs, as vLLM schedules a number a batch. What a request must not use (opt-outs,
confidence, back-off) is a mask by request row that outlives the draft by a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.host import DraftingHost, buckets
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.staging import GREEDY, KINDS, SAMPLED, TRUNCATED, Kind


class Speculator(DraftModelSpeculator):
    """Drives a drafter that needs nothing but the step's hidden states.

    A DraftModelSpeculator for what vLLM does for such alone: load_model, q(x) by request row, confidences.
    """

    draft_logits: torch.Tensor | None  # [request rows, K, vocabulary] q(x), as vLLM's rejection sampler reads it

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.config = required_config(vllm_config, self)
        super().__init__(vllm_config, device)
        self.req_states = req_states
        q_rows: torch.Tensor | None = None
        if self.draft_logits is not None:
            shape = self.draft_logits.shape[1:]
            self.draft_logits = None
            q_rows = torch.full((self.max_num_reqs + 1, *shape), float("-inf"), dtype=torch.float32, device=device)
            self.draft_logits = q_rows[:-1]
        self.host = DraftingHost(
            self.config,
            vllm_config,
            device,
            rows=self.max_num_reqs,
            num_drafts=self.num_speculative_steps,
            q_rows=q_rows,
            q_as_logits=True,  # T log q(x): vLLM's sampler divides by the request's temperature before its softmax
            confidence=self.draft_token_confidence_probs if self.enable_adaptive_verification else None,
        )
        self.draft_tokens = self.host.draft_tokens
        self.graphs: CudaGraphManager | None = None  # vLLM looks for such attributes when it measures their memory
        self.sampled_graphs: CudaGraphManager | None = None
        self.truncated_graphs: CudaGraphManager | None = None

    @property
    def counters(self) -> Counters:
        """Ours, for the step's output."""
        return self.host.counters

    # What vLLM asks for ----------------------------------------------------------------------------------------------

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """q(x) in float32; outside a draft vocabulary nothing is ever drafted."""
        return torch.float32, float("-inf")

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the heads; whatever layers they bring run with the target's."""
        self.host.load(target_model)
        return target_model

    def load_model(self, target_model: Any) -> None:
        self.model = self.load_draft_model(target_model, set())
        self.draft_attn_layer_names: set[str] = set()
        self.supports_mm_inputs = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.attn_groups: list[Any] = []  # no attention beside the target's

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.graphs, self.sampled_graphs, self.truncated_graphs = (
            CudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)
            if kind in self.host.kinds
            else None
            for kind in KINDS
        )

    def capture(self) -> None:
        for kind in self.host.kinds:
            manager = self._manager(kind)
            if manager is not None and manager.needs_capture():
                manager.capture(self._captured(kind), f"Capturing {kind} drafts")

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What runs the target's whole-model graphs."""
        return stock

    def prepare_capture(self, requests: int) -> None:
        """A graph of so many requests is about to be captured."""
        self.host.staging.clear()

    def _captured(self, kind: Kind) -> Callable[..., Callable[[CUDAGraphMode], None]]:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            self.prepare_capture(desc.num_tokens)
            return lambda mode: self.host.draft(desc.num_tokens, kind)

        return create

    def _manager(self, kind: Kind) -> CudaGraphManager | None:
        return {GREEDY: self.graphs, SAMPLED: self.sampled_graphs, TRUNCATED: self.truncated_graphs}[kind]

    # A step ----------------------------------------------------------------------------------------------------------

    def bind(self, runner: Any) -> None:
        """Take the loaded model runner."""
        self.runner = runner

    def add_request(self, row: int, params: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self.host.options.add(row, params)

    def begin_step(self, batch: Any) -> None:
        """The step's inputs are prepared, and the target is about to run."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft token IDs [requests, K]."""
        started, requests = time.perf_counter(), input_batch.num_reqs
        if dummy_run:
            # A dummy run takes the memory of every kind; the first compiles the kernels of every batch size.
            self.host.warm_up(buckets(requests) if is_profile else [requests], self._run if not is_profile else None)
            return self.draft_tokens[:requests]
        kind = self._kind(input_batch)
        self._stage(input_batch, last_hidden_states, num_sampled, num_rejected, last_sampled, kind)
        self._run(requests, kind)
        self.counters.add("drafting_seconds", time.perf_counter() - started)
        return self.draft_tokens[:requests]

    def _kind(self, batch: Any) -> Kind:
        """How the step's drafts are drawn, by what the host knows of its requests."""
        if self.host.q_rows is None:
            return GREEDY
        states, rows = self.runner.sampler.sampling_states, batch.idx_mapping_np
        sampling = states.temperature.np[rows] != 0
        if not sampling.any():
            return GREEDY
        drawn = sampling & ~self.host.options.drafts_greedily[rows]
        limited = (states.top_k.np[rows] != states.vocab_size) | (states.top_p.np[rows] != 1)
        return TRUNCATED if (limited & drawn).any() else SAMPLED

    def _stage(
        self,
        batch: Any,
        hidden: torch.Tensor,  # [tokens, hidden]
        num_sampled: torch.Tensor,  # [requests]
        num_rejected: torch.Tensor,  # [requests]
        last_sampled: torch.Tensor,  # [request rows, 1]
        kind: Kind,
    ) -> None:
        n, rows = batch.num_reqs, batch.idx_mapping[: batch.num_reqs]
        states = self.runner.sampler.sampling_states
        places = batch.query_start_loc[1 : n + 1].long() - 1 - num_rejected[:n]
        sampling = None
        if kind != GREEDY:
            limits = (states.top_k.gpu[rows], states.top_p.gpu[rows]) if kind == TRUNCATED else ()
            sampling = Sampling(states.temperature.gpu[rows], *limits)
        self.host.staging.clear()  # what CUDA graphs pad the batch with
        self.host.staging.stage(
            kind,
            # A chunk that does not end its prompt sampled nothing: it is padding, too.
            rows=torch.where(num_sampled[:n] > 0, rows, -1),
            newest_ids=last_sampled[rows, 0],
            hidden=hidden,
            places=places,
            positions=batch.positions[places] + 1,
            max_drafts=self._max_drafts(rows),
            sampling=sampling,
        )
        if self.host.staging.context is not None:
            self._stage_context(rows, self.host.staging.context[:n])

    def _max_drafts(self, rows: torch.Tensor) -> torch.Tensor:
        """Drafts that each request may use, after the soft cut-off: [requests]."""
        drafting, limit = self.host.options.on_device["drafting"][rows], self.config.max_drafting_requests
        if limit is not None:
            drafting = drafting & (drafting.cumsum(0) <= limit)
        return drafting * self.host.num_drafts

    def _stage_context(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The latest tokens, newest first, -1 where there are none."""
        states = self.req_states
        at = states.total_len.gpu[rows].long()[:, None] - 1 - torch.arange(out.shape[1], device=out.device)
        tokens = states.all_token_ids.gpu[rows[:, None], at.clamp(min=0)].long()
        out.copy_(torch.where(at < 0, -1, tokens))

    def _run(self, requests: int, kind: Kind) -> None:
        manager = self._manager(kind)
        if manager is not None:
            desc = manager.dispatch(requests, requests, 1, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                manager.run_fullgraph(desc)
                return
        self.host.draft(requests, kind)

    def unusable(self, batch: Any) -> torch.Tensor:
        """Of the step's logits [logits] bool: whether it is of a draft that its request must not use."""
        return batch.expanded_local_pos > self.host.usable[batch.expanded_idx_mapping]
