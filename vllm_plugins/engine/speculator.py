# SPDX-License-Identifier: Apache-2.0
"""Drafting methods as speculators of vLLM's runner V2.

    stage   gather the drafter's inputs by request row (staging.py): one launch
    draft   DraftInputs -> Drafts, then draft IDs on the device: one CUDA graph
    verify  in the next step, by the tokens that the target draws (verification.py)

Every request of a step gets K draft IDs, as vLLM schedules one number for a batch;
drafts that a request must not use are rejected during verification. Nothing waits for
the device.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ppd.kernels.staging import StepEnd
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.draft_length.learning import Orders, Report
from vllm_ppd.vllm_plugins.engine.drafter import Drafter
from vllm_ppd.vllm_plugins.engine.lookup import Lookup
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.staging import (
    DeviceCounts,
    RequestOptions,
    Setting,
    Staging,
    batch_sizes,
)
from vllm_ppd.vllm_plugins.engine.target import Target
from vllm_ppd.vllm_plugins.engine.verification import UnverifiedDrafts

logger = logging.getLogger("vllm.vllm_ppd")


def decode_only(mode: CUDAGraphMode) -> CUDAGraphMode:
    """Whole-model graphs of decode steps if vLLM's mode has them, else none."""
    full = mode.decode_mode() == CUDAGraphMode.FULL
    return CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE


class Speculator(DraftModelSpeculator):
    """Drives a drafter over permanent request rows.

    Row -1 is one more, to which the padding of CUDA graphs writes. It is a
    DraftModelSpeculator, since vLLM calls load_model for such only.
    """

    runner: Any  # the model runner, once it has loaded the target
    drafter: Drafter
    target: Target
    staging: Staging

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any
    ) -> None:
        self.config = required_config(vllm_config, self)
        super().__init__(vllm_config, device)
        self.req_states = req_states
        rows = self.max_num_reqs
        drafts = self.num_speculative_steps
        verified = self.config.verify
        eps_b = self.config.eps_b or 0.0
        self.options = RequestOptions(rows, drafts, device, verified, eps_b)
        self.counters = Counters()
        # Whether drafts of sampling requests are drawn, with the target's own random
        # numbers; else each is the best.
        self.sampled = (
            self.config.draft_sample_method == "probabilistic" or not verified
        )
        self.lookup: Lookup | None = None
        if self.config.prompt_lookup_min:
            self.lookup = Lookup(self.config, rows, req_states, device)
            if vllm_config.model_config.is_multimodal_model:
                self.lookup.vocab_size = req_states.vocab_size
        self.unverified = None if verified else UnverifiedDrafts(rows, device)
        self._drafts = torch.arange(drafts, device=device)
        self._invalid = DeviceCounts(1, device)
        self._warned_invalid = False
        # vLLM reads such attributes to measure their memory
        self.graphs: CudaGraphManager | None = None
        self.sampled_graphs: CudaGraphManager | None = None

    # Start ----------------------------------------------------------------------------

    def load_draft_model(
        self, target_model: Any, target_attn_layer_names: set[str]
    ) -> Any:
        """Load the drafter for the loaded target and allocate everything, before vLLM
        measures the memory left.

        Returns:
            None. vLLM registers a draft model for EPLB, sends a trainer's weights to
            it, and saves it before it sleeps. It must not do so with the target a
            second time.
        """
        self.target = Target(target_model, self.vllm_config, self.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        self.staging = Staging(self.max_num_reqs, self.target, self.options)

    def load_model(self, target_model: Any) -> None:
        self.model = self.load_draft_model(target_model, set())
        self.draft_attn_layer_names: set[str] = set()

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.attn_groups: list[Any] = []  # no attention besides the target's

    def _warm_up(self, sizes: Iterable[int]) -> None:
        """Draft for padding at some batch sizes, sampled and greedily, to allocate
        memory and compile kernels.
        """
        on_gpu = [self.device] if self.device.type == "cuda" else []
        # It must not influence samples
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode():
            self.staging.stage_nobody()
            for requests in sizes:
                if self.sampled:
                    self._run(requests, True)
                self._run(requests, False)

    # CUDA graphs ----------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = self._new_graphs(cudagraph_mode)
        if self.sampled:
            self.sampled_graphs = self._new_graphs(cudagraph_mode)

    def _new_graphs(self, cudagraph_mode: CUDAGraphMode) -> CudaGraphManager:
        return CudaGraphManager(
            self._config_of_graphs(), self.device, decode_only(cudagraph_mode), 1
        )

    def _config_of_graphs(self) -> Any:
        """vLLM's configuration for graphs of drafts, up to the largest batch whose
        verification has a graph.
        """
        config = copy.copy(self.vllm_config)
        sizes = config.compilation_config.cudagraph_capture_sizes
        if sizes:
            config.scheduler_config = copy.copy(config.scheduler_config)
            verified = max(max(sizes) // (1 + self.num_speculative_steps), 1)
            config.scheduler_config.max_num_seqs = min(
                verified, self.max_num_reqs
            )
        return config

    def capture(self) -> None:
        self._capture("greedy", self.graphs)
        self._capture("sampled", self.sampled_graphs)

    def _capture(self, kind: str, manager: CudaGraphManager | None) -> None:
        if manager is not None and manager.needs_capture():
            prepare = partial(self.prepare_capture, kind == "sampled")
            manager.capture(prepare, f"Capturing {kind} drafts")

    def _graphs_of(self, sampled: bool) -> CudaGraphManager | None:
        """The graphs of the coming drafts."""
        return self.sampled_graphs if sampled else self.graphs

    def prepare_capture(
        self, sampled: bool, desc: BatchExecutionDescriptor, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        """Prepare the capture of a graph: what it runs."""
        self.stage_padding(desc.num_tokens)
        return lambda mode: self._draft(desc.num_tokens, sampled)

    def stage_padding(self, requests: int) -> None:
        """Stage nobody, as a number of requests, for the capture of a graph."""
        self.staging.stage_nobody()

    # A step ---------------------------------------------------------------------------

    def add_request(self, row: int, new: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption.

        Args:
            row: of the request.
            new: vLLM's NewRequestData.
        """
        self.options.add(row, new.sampling_params)
        if self.lookup is not None:
            self.lookup.add_request(row)

    def read_at(self, exit: int) -> None:
        """Choose where the coming step's drafts are read, before it begins.

        Args:
            exit: index of one of the configured exit layers.
        """

    def begin_step(self, batch: Any) -> None:
        """Begin a step whose inputs are prepared, before the target runs."""

    def end_step(self) -> None:
        """End a step or a dummy step, after the target has run or raised an exception."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *,
        dummy_run: bool = False,
        is_profile: bool = False,
        **others: Any,
    ) -> Tensor:
        """Draft token IDs [requests, K]."""
        started = time.perf_counter()
        requests: int = input_batch.num_reqs
        if dummy_run:
            # A profile uses the memory of every code path, and compiles the kernels of
            # every batch size.
            self._warm_up(batch_sizes(requests) if is_profile else [requests])
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
            self.options.apply()
            if self.lookup is not None:
                self.lookup.apply()
            settings = self.options.settings[input_batch.idx_mapping_np]
            sampled = self.sampled and settings[:, Setting.TEMPERATURE].any()
            self._run(requests, sampled, end)
            self.counters.add("drafting_seconds", time.perf_counter() - started)
        return self.draft_tokens[:requests]

    def _run(
        self, requests: int, sampled: bool, end: StepEnd | None = None
    ) -> None:
        """Stage a step, unless it is a dummy one, and draft: by a CUDA graph where one
        has its size.
        """
        manager = self._graphs_of(sampled)
        graph = None
        if manager is not None:
            dispatched = manager.dispatch(requests, requests, 1, 0)
            full = dispatched.cg_mode == CUDAGraphMode.FULL
            if full and dispatched in manager.graphs:
                graph = dispatched
        if end is not None:
            self.staging.stage(
                end, requests if graph is None else graph.num_tokens
            )
        if manager is None or graph is None:
            self._draft(requests, sampled)
        else:
            manager.run_fullgraph(graph)

    def _draft(self, requests: int, sampled: bool) -> None:
        """Draft for the staged requests, and leave the tokens that the next step embeds
        and verifies on the device.

        Part of a CUDA graph.
        """
        size = self.drafter.requests_at_once or requests
        for start in range(0, requests, size):
            self._draft_for(slice(start, min(start + size, requests)), sampled)

    def _draft_for(self, places: slice, sampled: bool) -> None:
        """Draft for some of the staged requests."""
        rows = self.staging.staged.rows[places]
        looked_up = None if self.lookup is None else self.lookup.find(rows)
        inputs = self.staging.inputs(places, sampled, looked_up)
        drafts = self.drafter.propose(inputs)
        # vLLM embeds and verifies each of them, so an INVALID one becomes a token.
        token_ids = self.draft_tokens[places]
        torch.clamp(drafts.token_ids, min=0, out=token_ids)
        if self.lookup is not None and looked_up is not None:
            first = drafts.token_ids[:, 0]
            self.lookup.choose(rows, looked_up, first, token_ids)

        # Padding, row -1, may use none.
        usable = self.options.on_device[rows, Setting.MAX_DRAFTS]
        invalid = drafts.token_ids < 0
        if drafts.counts is not None:
            invalid &= self._drafts < drafts.counts[:, None]
            usable = torch.minimum(usable, drafts.counts)
        affected = torch.empty_like(rows)
        torch.logical_and(invalid.any(dim=1), usable, out=affected)
        self._invalid.value += affected.sum()
        if self.unverified is not None:
            valid = (drafts.token_ids >= 0).cumprod(dim=1).sum(dim=1)
            self.unverified.counts[rows] = torch.minimum(valid, usable.long())

    # After a step ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Copy again what drafting copied of the target's weights."""
        self.drafter.refresh()

    def record(self, *step: Any) -> None:
        """Learn from a verified step; arguments are those of Pairs.record."""

    def follow(self, orders: Orders | None) -> Report | None:
        """Follow the scheduler's orders about learning.

        Returns:
            How far learning is; None if nothing is learned.
        """
        return None

    def take_counts(self) -> None:
        """Add the device's counts to ours."""
        invalid = self._invalid.take()
        if invalid:
            self.counters.add("invalid_drafts", invalid)
            if not self._warned_invalid:
                self._warned_invalid = True
                logger.warning(
                    "vllm-ppd: dropped drafts with NaN or infinite logits: the heads are "
                    "damaged, or made for another model; train or copy them again, see "
                    "ppd inspect. Further cases are only counted (ppd:invalid_drafts)"
                )
        if self.unverified is not None:
            self.counters.add("unverified_tokens", self.unverified.emitted.take())

    def unusable(self, batch: Any) -> Tensor | None:
        """Which of the step's logits belong to drafts that their request must not use:
        [logits] bool; None: none.

        Only drafts beyond a request's own number are not to be used. Drafts that the
        method does not propose are verified, too, as vLLM schedules one number for a
        batch, and accepted if they are right.
        """
        if self.unverified is not None:
            return self.unverified.beyond(batch)
        settings = self.options.settings[batch.idx_mapping_np]
        if (settings[:, Setting.MAX_DRAFTS] == self.num_speculative_steps).all():
            return None
        self.options.apply()
        max_drafts = self.options.on_device[
            batch.expanded_idx_mapping, Setting.MAX_DRAFTS
        ]
        return batch.expanded_local_pos > max_drafts
