# SPDX-License-Identifier: Apache-2.0
"""A drafting method as a speculator of vLLM's runner V2: it runs the method's own drafter, and never waits for it.

    stage   gather the drafter's inputs by request row into buffers that CUDA graphs read
    draft   DraftInputs -> Drafts, then draft IDs, q(x), confidence and usable drafts by request row (one graph)
    verify  in the next step: vLLM's rejection sampler with q(x); unusable drafts are rejected

Every request of a step is given K draft IDs, as vLLM schedules a number a batch. What a request must not use (opt-outs,
confidence, back-off) is a mask that outlives the draft by a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ppd.kernels.sampling import is_greedy
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.drafting.buckets import buckets
from vllm_ppd.vllm_plugins.drafting.drafter import DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.invalid_drafts import InvalidDrafts
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.target import Target
from vllm_ppd.vllm_plugins.engine.v2.device_counts import DeviceCounts
from vllm_ppd.vllm_plugins.engine.v2.requests import RequestOptions
from vllm_ppd.vllm_plugins.engine.v2.staging import GREEDY, KINDS, SAMPLED, TRUNCATED, Kind, Staging


class Speculator(DraftModelSpeculator):
    """Drives a drafter that needs nothing but the step's hidden states.

    A DraftModelSpeculator for what vLLM does for such alone: load_model, q(x) by request row, confidences.
    """

    requests: RequestOptions
    draft_logits: torch.Tensor | None  # [request rows, K, vocabulary] q(x), as vLLM's rejection sampler reads it
    shallow: Callable[[int, torch.Tensor], CutState] | None = None  # DraftInputs.shallow

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.config = required_config(vllm_config, self)
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.num_drafts: int = self.num_speculative_steps
        rows = self.max_num_reqs + 1  # the last takes what padding of CUDA graphs writes, row -1
        self.usable = torch.zeros(rows, self.num_drafts, dtype=torch.bool, device=device)
        self.ordinals = torch.arange(self.num_drafts, device=device)
        self.q_rows: torch.Tensor | None = None
        if self.draft_logits is not None:
            shape, fill = self.draft_logits.shape[1:], float("-inf")
            self.draft_logits = None
            self.q_rows = torch.full((rows, *shape), fill, dtype=torch.float32, device=device)
            self.draft_logits = self.q_rows[:-1]
        self.requests = RequestOptions(self.max_num_reqs)
        self.counters = Counters()
        self.invalid = InvalidDrafts(self.counters)
        self.device_counts = DeviceCounts(("invalid_drafts", "confidence_stops"), device)
        self.staging = Staging(self)
        self.graphs: CudaGraphManager | None = None  # vLLM looks for such attributes when it measures their memory
        self.sampled_graphs: CudaGraphManager | None = None
        self.truncated_graphs: CudaGraphManager | None = None

    # What vLLM asks for ----------------------------------------------------------------------------------------------

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """q(x) in float32; outside a draft vocabulary nothing is ever drafted."""
        return torch.float32, float("-inf")

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the heads; whatever layers they bring run with the target's."""
        self.target = Target(target_model, self.vllm_config, self.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        self.staging.load(self.drafter)
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
            CudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1) if kind in self.kinds else None
            for kind in KINDS
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Ways of drafting that may be asked for."""
        return (GREEDY,) if self.q_rows is None else KINDS

    def capture(self) -> None:
        for kind in self.kinds:
            manager = self._manager(kind)
            if manager is not None and manager.needs_capture():
                manager.capture(self._captured(kind), f"Capturing {kind} drafts")

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What runs the target's whole-model graphs."""
        return stock

    def _captured(self, kind: Kind) -> Callable[..., Callable[[CUDAGraphMode], None]]:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            self.staging.clear()
            return lambda mode: self.draft(desc.num_tokens, kind)

        return create

    def _manager(self, kind: Kind) -> CudaGraphManager | None:
        return {GREEDY: self.graphs, SAMPLED: self.sampled_graphs, TRUNCATED: self.truncated_graphs}[kind]

    # A step ----------------------------------------------------------------------------------------------------------

    def bind(self, runner: Any) -> None:
        """Take the loaded model runner."""
        self.runner = runner

    def add_request(self, row: int, params: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self.requests.add(row, params, self.num_drafts)

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
        kinds = self.kinds[::-1] if dummy_run else (self.staging.kind(input_batch),)
        self.staging.gather(
            input_batch, last_hidden_states, num_sampled, num_rejected, last_sampled, kinds[0], dummy_run
        )
        # A dummy run takes the memory of every kind; the first one compiles the kernels of every batch size.
        for size in buckets(requests) if is_profile else (requests,):
            for kind in kinds:
                self._run(size, kind, is_profile)
        if not dummy_run:
            self.counters.add("drafting_seconds", time.perf_counter() - started)
        return self.draft_tokens[:requests]

    def _run(self, requests: int, kind: Kind, eager: bool) -> None:
        manager = self._manager(kind)
        if manager is not None and not eager:
            desc = manager.dispatch(requests, requests, 1, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                manager.run_fullgraph(desc)
                return
        self.draft(requests, kind)

    def draft(self, requests: int, kind: Kind) -> None:
        """From the staged inputs to the buffers that vLLM reads: the part that CUDA graphs hold."""
        staging = self.staging
        inputs = DraftInputs(
            newest_ids=staging.newest_ids[:requests],
            hidden=staging.hidden[:requests],
            places=staging.places[:requests],
            max_drafts=staging.max_drafts[:requests],
            num_drafts=self.num_drafts,
            sampling=staging.sampling(requests, kind),
            shallow=self.shallow,
            options={"eps_b": staging.eps_b[:requests]},
            context=None if staging.context is None else staging.context[:requests],
            with_confidence=self.enable_adaptive_verification,
        )
        drafts = self.drafter.propose(inputs)
        rows = staging.rows[:requests]
        self._keep(drafts, rows, inputs)
        if self.q_rows is not None and inputs.sampling is not None and drafts.probs is not None:
            self._keep_q(drafts.probs, rows, staging.temperature[:requests])

    def _keep(self, drafts: Drafts, rows: torch.Tensor, inputs: DraftInputs) -> None:
        counts = inputs.max_drafts
        if drafts.counts is not None:
            counts = torch.minimum(drafts.counts, counts)
        usable = ((self.ordinals < counts[:, None]) & (drafts.token_ids >= 0)).cumprod(dim=1).bool()
        requests = rows >= 0
        self.device_counts.add("invalid_drafts", requests & (usable.sum(dim=1) < counts))
        if self.shallow is not None and drafts.counts is not None:
            self.device_counts.add("confidence_stops", requests & (counts < inputs.max_drafts))
        self.usable[rows] = usable
        # vLLM embeds whatever stands here, so that an INVALID draft must be some token.
        self.draft_tokens[: len(rows)] = drafts.token_ids.clamp(min=0)
        if inputs.with_confidence:
            assert drafts.confidence is not None
            # Adaptive verification leaves out first what would be rejected anyway.
            self.draft_token_confidence_probs[: len(rows)] = torch.where(usable, drafts.confidence, 0.0)

    def _keep_q(self, q: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> None:
        """T log q(x): the rejection sampler divides by the request's temperature before its softmax."""
        assert self.q_rows is not None
        logits = q.log() * torch.where(is_greedy(temperature), 1.0, temperature)[:, None, None]
        if self.drafter.vocabulary is not None and q.shape[-1] < self.q_rows.shape[-1]:
            self.q_rows[rows[:, None, None], self.ordinals[:, None], self.drafter.vocabulary.token_ids] = logits
        else:
            self.q_rows[rows] = logits

    def take_counts(self) -> None:
        """Take in what the device has counted so far."""
        counted = self.device_counts.take()
        self.invalid.add(counted.pop("invalid_drafts", 0))
        for name, number in counted.items():
            self.counters.add(name, number)

    def unusable(self, batch: Any) -> torch.Tensor:
        """Of the step's logits [logits] bool: whether it is of a draft that its request must not use."""
        offset = batch.expanded_local_pos.long()
        usable = self.usable[batch.expanded_idx_mapping, (offset - 1).clamp(min=0)]
        return ~usable & (offset > 0)
