# SPDX-License-Identifier: Apache-2.0
"""Drafting methods as speculators of vLLM's runner V2: the adapter between vLLM's batch and the drafting host.

Every request of a step gets K draft IDs, as vLLM schedules one number for a batch; drafts that it must not use are
masked during verification. A decode step launches one staging kernel and replays one graph.
"""

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ppd.kernels.staging import StepEnd
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.host import DraftingHost, buckets
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.requests import Setting
from vllm_ppd.vllm_plugins.engine.v2.lookup import Lookup
from vllm_ppd.vllm_plugins.engine.v2.unverified import UnverifiedDrafts

logger = logging.getLogger("vllm.vllm_ppd")


class Speculator(DraftModelSpeculator):
    """Drives a drafter that needs only the step's hidden states.

    It is a DraftModelSpeculator, since vLLM calls load_model for such only.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.config = required_config(vllm_config, self)
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.host = DraftingHost(
            self.config,
            vllm_config,
            device,
            rows=self.max_num_reqs,
            num_drafts=self.num_speculative_steps,
            sampled=self.config.draft_sample_method == "probabilistic" or not self.config.verify,
        )
        self.draft_tokens, self.lookup = self.host.draft_tokens, None
        if (shortest := self.config.prompt_lookup_min) is not None:
            self.lookup = Lookup(shortest, self.max_num_reqs, self.num_speculative_steps, req_states, device)
        self.unverified: UnverifiedDrafts | None = None
        if not self.config.verify:
            self.unverified = UnverifiedDrafts(self.max_num_reqs, device)
        self.graphs: CudaGraphManager | None = None  # vLLM reads such attributes to measure their memory
        self.sampled_graphs: CudaGraphManager | None = None

    @property
    def counters(self) -> Counters:
        """Our counters, for the step's output."""
        return self.host.counters

    # What vLLM asks for ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the heads; layers that they add run with the target's.

        Returns:
            None. vLLM registers a draft model for EPLB, sends a trainer's weights to it, and saves it before it sleeps.
            It must not do so with the target a second time.
        """
        self.host.load(target_model)

    def load_model(self, target_model: Any) -> None:
        self.model = self.load_draft_model(target_model, set())
        self.draft_attn_layer_names: set[str] = set()
        self.supports_mm_inputs = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.attn_groups: list[Any] = []  # no attention besides the target's

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        config = self._config_of_graphs()
        self.graphs = CudaGraphManager(config, self.device, mode, decode_query_len=1)
        if self.host.sampled:
            self.sampled_graphs = CudaGraphManager(config, self.device, mode, decode_query_len=1)
        wanted = self.vllm_config.compilation_config.cudagraph_mode
        if wanted.decode_mode() != CUDAGraphMode.FULL and self.device.type != "cpu":
            logger.info("vllm-ppd: drafts run without CUDA graphs, as cudagraph_mode is %s", wanted.name)

    def _config_of_graphs(self) -> Any:
        """vLLM's configuration for graphs of drafts, up to the largest batch whose verification has a graph."""
        config = copy.copy(self.vllm_config)
        sizes = config.compilation_config.cudagraph_capture_sizes
        if sizes:
            config.scheduler_config = copy.copy(config.scheduler_config)
            verified = max(max(sizes) // (1 + self.num_speculative_steps), 1)
            config.scheduler_config.max_num_seqs = min(verified, self.max_num_reqs)
        return config

    def capture(self) -> None:
        for sampled, manager in enumerate((self.graphs, self.sampled_graphs)):
            if manager is not None and manager.needs_capture():
                manager.capture(self._captured(bool(sampled)), f"Capturing {'sampled' if sampled else 'greedy'} drafts")
                if not sampled:
                    self._log_batches_without_graphs(manager)

    def _log_batches_without_graphs(self, manager: CudaGraphManager) -> None:
        sizes = range(1, self.max_num_reqs + 1)
        without = [size for size in sizes if manager.dispatch(size, size, 1, 0).cg_mode != CUDAGraphMode.FULL]
        if without:
            logger.info(
                "vllm-ppd: drafts of %d to %d requests run without CUDA graphs; raise cudagraph_capture_sizes if such "
                "batches are common",
                without[0],
                without[-1],
            )

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The object that runs the target's whole-model graphs."""
        return stock

    def prepare_capture(self, requests: int) -> None:
        """Prepare the capture of a graph for a number of requests."""
        self.host.staging.stage_nobody()

    def _captured(self, sampled: bool) -> Callable[..., Callable[[CUDAGraphMode], None]]:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            self.prepare_capture(desc.num_tokens)
            return lambda mode: self._draft(desc.num_tokens, sampled)

        return create

    # A step ----------------------------------------------------------------------------------------------------------

    def bind(self, runner: Any) -> None:
        """Take the loaded model runner."""
        self.runner = runner

    def add_request(self, row: int, params: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self.host.options.add(row, params)

    def begin_step(self, batch: Any) -> None:
        """Begin a step whose inputs are prepared, before the target runs."""

    def end_step(self) -> None:
        """End a step or a dummy step, after the target has run or raised an exception."""

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
            # A dummy run uses the memory of every code path; the first compiles the kernels of every batch size.
            self.host.warm_up(buckets(requests) if is_profile else [requests], self._draft if is_profile else self._run)
        else:
            end = StepEnd(
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                num_sampled,
                num_rejected,
                last_sampled,
                input_batch.positions,
                last_hidden_states,
                seeds,
            )
            self._run(requests, self.host.samples(input_batch.idx_mapping_np), end)
            self.counters.add("drafting_seconds", time.perf_counter() - started)
        return self.draft_tokens[:requests]

    def _run(self, requests: int, sampled: bool, end: StepEnd | None = None) -> None:
        """Stage a step, unless it is a dummy one, and draft: by a CUDA graph where one has its size."""
        manager, graph = self.sampled_graphs if sampled else self.graphs, None
        if manager is not None:
            graph = manager.dispatch(requests, requests, 1, 0)
            graph = graph if graph.cg_mode == CUDAGraphMode.FULL else None
        if end is not None:
            self.host.staging.stage(end, requests if graph is None else graph.num_tokens)
            if self.host.staging.context is not None:
                self._stage_context(end.rows, self.host.staging.context[:requests])
        if graph is None:
            self._draft(requests, sampled)
        else:
            assert manager is not None
            manager.run_fullgraph(graph)

    def _draft(self, requests: int, sampled: bool) -> None:
        """Draft for the staged requests; part of a CUDA graph."""
        looked_up = None
        if self.lookup is not None:
            looked_up = self.lookup.find(self.host.staging.rows[:requests])
        drafts = self.host.draft_on_device(requests, sampled, looked_up)
        if self.unverified is not None:
            staging = self.host.staging
            max_drafts = staging.setting(Setting.MAX_DRAFTS, requests)
            self.unverified.store(staging.rows[:requests], drafts, max_drafts)

    def _stage_context(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Stage the latest tokens, newest first, -1 for missing ones."""
        states = self.req_states
        at = states.total_len.gpu[rows].long()[:, None] - 1 - torch.arange(out.shape[1], device=out.device)
        tokens = states.all_token_ids.gpu[rows[:, None], at.clamp(min=0)].long()
        out.copy_(torch.where(at < 0, -1, tokens))

    def take_counts(self) -> None:
        """Add the device's counts to ours."""
        self.host.take_counts()
        if self.unverified is not None:
            self.counters.add("unverified_tokens", self.unverified.emitted.take())

    def unusable(self, batch: Any) -> torch.Tensor | None:
        """Which of the step's logits belong to drafts that their request must not use: [logits] bool; None: none.

        Only requests that opted out must not use theirs. Drafts that the method does not propose are verified, too, as
        vLLM schedules one number for a batch, and accepted if they are right.
        """
        if self.unverified is not None:
            return self.unverified.beyond(batch)
        options = self.host.options
        if options.drafting[batch.idx_mapping_np].all():
            return None
        return (options.on_device[batch.expanded_idx_mapping, Setting.MAX_DRAFTS] == 0) & (batch.expanded_local_pos > 0)
