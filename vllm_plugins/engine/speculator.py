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
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ppd.kernels.staging import StepEnd
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.device_count import DeviceCount
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, Drafts, FirstStack, LookedUp
from vllm_ppd.vllm_plugins.engine.lookup import Lookup
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.staging import (
    RequestOptions,
    Setting,
    Staging,
    batch_sizes,
)
from vllm_ppd.vllm_plugins.engine.target import Target
from vllm_ppd.vllm_plugins.engine.unverified import UnverifiedDrafts

logger = logging.getLogger("vllm.vllm_ppd")


class Speculator(DraftModelSpeculator):
    """Drives a drafter over permanent request rows.

    Row -1 is one more, to which the padding of CUDA graphs writes. It is a
    DraftModelSpeculator, since vLLM calls load_model for such only.
    """

    drafter: Drafter
    target: Target
    staging: Staging
    first_stack: FirstStack | None = None  # of a target that the drafter cuts

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.config = required_config(vllm_config, self)
        super().__init__(vllm_config, device)
        self.req_states = req_states
        drafts = self.num_speculative_steps
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.options = RequestOptions(
            self.max_num_reqs, drafts, vocab_size, device, self.config.verify
        )
        self.counters = Counters()
        # Whether drafts of sampling requests are drawn, with the target's own random
        # numbers; else each is the best.
        self.sampled = (
            self.config.draft_sample_method == "probabilistic" or not self.config.verify
        )
        self.draft_tokens = torch.zeros(
            self.max_num_reqs, drafts, dtype=torch.int64, device=device
        )
        self.lookup: Lookup | None = None
        if (shortest := self.config.prompt_lookup_min) is not None:
            self.lookup = Lookup(
                shortest, self.max_num_reqs, drafts, req_states, device
            )
        self.unverified: UnverifiedDrafts | None = None
        if not self.config.verify:
            self.unverified = UnverifiedDrafts(self.max_num_reqs, device)
        self._invalid = DeviceCount(device)
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
        reads_eps_b = "eps_b" in self.config.spec.request_options
        self.staging = Staging(
            self.max_num_reqs, self.target, self.drafter, self.options, reads_eps_b
        )
        # In place of an INVALID draft: a token of the draft vocabulary.
        vocabulary = self.drafter.vocabulary
        self._stand_in = 0 if vocabulary is None else int(vocabulary.token_ids[0])

    def load_model(self, target_model: Any) -> None:
        self.model = self.load_draft_model(target_model, set())
        self.draft_attn_layer_names: set[str] = set()
        self.supports_mm_inputs = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.attn_groups: list[Any] = []  # no attention besides the target's

    def bind(self, runner: Any) -> None:
        """Take the loaded model runner."""
        self.runner = runner

    def warm_up(self, sizes: Iterable[int], draft: Callable[[int, bool], Any]) -> None:
        """Draft for padding at some batch sizes, sampled and greedily, to allocate
        memory and compile kernels.

        Args:
            sizes: requests.
            draft: of (requests, sampled).
        """
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=on_gpu),
            torch.inference_mode(),
        ):  # must not influence samples
            self.staging.stage_nobody()
            for requests in sizes:
                if self.sampled:
                    draft(requests, True)
                draft(requests, False)

    # CUDA graphs ----------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        config = self._config_of_graphs()
        self.graphs = CudaGraphManager(config, self.device, mode, decode_query_len=1)
        if self.sampled:
            self.sampled_graphs = CudaGraphManager(
                config, self.device, mode, decode_query_len=1
            )
        wanted = self.vllm_config.compilation_config.cudagraph_mode
        if wanted.decode_mode() != CUDAGraphMode.FULL and self.device.type != "cpu":
            logger.info(
                "vllm-ppd: drafts run without CUDA graphs, as cudagraph_mode is %s",
                wanted.name,
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
            config.scheduler_config.max_num_seqs = min(verified, self.max_num_reqs)
        return config

    def capture(self) -> None:
        if self.graphs is not None and self.graphs.needs_capture():
            self.graphs.capture(
                self._captured(sampled=False), "Capturing greedy drafts"
            )
            self._log_batches_without_graphs(self.graphs)
        if self.sampled_graphs is not None and self.sampled_graphs.needs_capture():
            self.sampled_graphs.capture(
                self._captured(sampled=True), "Capturing sampled drafts"
            )

    def _log_batches_without_graphs(self, manager: CudaGraphManager) -> None:
        sizes = range(1, self.max_num_reqs + 1)
        eager = [
            size
            for size in sizes
            if manager.dispatch(size, size, 1, 0).cg_mode != CUDAGraphMode.FULL
        ]
        if eager:
            logger.info(
                "vllm-ppd: drafts of %d to %d requests run without CUDA graphs; "
                "raise cudagraph_capture_sizes if such batches are common",
                eager[0],
                eager[-1],
            )

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function that runs the target's whole-model graphs."""
        return stock

    def prepare_capture(self, requests: int) -> None:
        """Prepare the capture of a graph for a number of requests."""
        self.staging.stage_nobody()

    def _captured(
        self, sampled: bool
    ) -> Callable[..., Callable[[CUDAGraphMode], None]]:
        def create(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            self.prepare_capture(desc.num_tokens)

            def draft(mode: CUDAGraphMode) -> None:
                self._draft(desc.num_tokens, sampled)

            return draft

        return create

    # A step ---------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self.options.add(row, params)

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
        started = time.perf_counter()
        requests: int = input_batch.num_reqs
        if is_profile:
            # A dummy run uses the memory of every code path; the first compiles the
            # kernels of every batch size.
            self.warm_up(batch_sizes(requests), self._draft)
        elif dummy_run:
            self.warm_up([requests], self._run)
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
            self._run(requests, self._samples(input_batch.idx_mapping_np), end)
            self.counters.add("drafting_seconds", time.perf_counter() - started)
        return self.draft_tokens[:requests]

    def _samples(self, rows: np.ndarray) -> bool:
        """Whether drafts of any of some request rows are drawn."""
        return self.sampled and not self.options.is_greedy[rows].all()

    def _run(self, requests: int, sampled: bool, end: StepEnd | None = None) -> None:
        """Stage a step, unless it is a dummy one, and draft: by a CUDA graph where one
        has its size.
        """
        manager = self.sampled_graphs if sampled else self.graphs
        graph = None
        if manager is not None:
            graph = manager.dispatch(requests, requests, 1, 0)
            if graph.cg_mode != CUDAGraphMode.FULL:
                graph = None
        if end is not None:
            self.staging.stage(end, requests if graph is None else graph.num_tokens)
            if self.staging.context is not None:
                self._stage_context(end.rows, self.staging.context[:requests])
        if graph is None:
            self._draft(requests, sampled)
        else:
            assert manager is not None
            manager.run_fullgraph(graph)

    def _stage_context(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Stage the latest tokens, newest first, -1 for missing ones."""
        states = self.req_states
        at = (
            states.total_len.gpu[rows].long()[:, None]
            - 1
            - torch.arange(out.shape[1], device=out.device)
        )
        tokens = states.all_token_ids.gpu[rows[:, None], at.clamp(min=0)].long()
        out.copy_(torch.where(at < 0, -1, tokens))

    def _draft(self, requests: int, sampled: bool) -> None:
        """Draft for the staged requests, and leave the tokens that the next step embeds
        and verifies on the device.

        Part of a CUDA graph.
        """
        rows = self.staging.rows[:requests]
        looked_up = None if self.lookup is None else self.lookup.find(rows)
        inputs = self.staging.inputs(
            requests, sampled, self.num_speculative_steps, looked_up
        )
        drafts = self.drafter.propose(inputs, self.first_stack)
        max_drafts = self.staging.setting(Setting.MAX_DRAFTS, requests).long()
        self._count_invalid(drafts, rows, max_drafts)
        self._keep(drafts, looked_up)
        if self.unverified is not None:
            self.unverified.store(rows, drafts, max_drafts)

    def _count_invalid(
        self, drafts: Drafts, rows: torch.Tensor, max_drafts: torch.Tensor
    ) -> None:
        """Count the requests with an INVALID draft among those that they may use."""
        usable = max_drafts.clamp(max=drafts.token_ids.shape[1])
        if drafts.counts is not None:
            usable = torch.minimum(usable, drafts.counts)
        valid = (drafts.token_ids >= 0).cumprod(dim=1).sum(dim=1)
        self._invalid.value += ((rows >= 0) & (valid < usable)).sum()

    def _keep(self, drafts: Drafts, looked_up: LookedUp | None) -> None:
        """Write the draft tokens; vLLM embeds and verifies each of them, so an INVALID
        one becomes a token that is.
        """
        token_ids = torch.where(drafts.token_ids < 0, self._stand_in, drafts.token_ids)
        tokens = self.draft_tokens[: len(token_ids)]
        tokens[:, : token_ids.shape[1]] = token_ids
        if looked_up is not None:
            torch.where(
                looked_up.matched[:, None], looked_up.token_ids, tokens, out=tokens
            )

    # After a step ---------------------------------------------------------------------

    def take_counts(self) -> None:
        """Add the device's counts to ours."""
        invalid = self._invalid.take()
        self.counters.add("invalid_drafts", invalid)
        if invalid and not self._warned_invalid:
            self._warned_invalid = True
            logger.warning(
                "vllm-ppd: dropped drafts with NaN or infinite logits: the heads are "
                "damaged, or made for another model; train or copy them again, see "
                "ppd inspect. Further cases are only counted (ppd:invalid_drafts)"
            )
        if self.unverified is not None:
            self.counters.add("unverified_tokens", self.unverified.emitted.take())

    def unusable(self, batch: Any) -> torch.Tensor | None:
        """Which of the step's logits belong to drafts that their request must not use:
        [logits] bool; None: none.

        Only requests that opted out must not use theirs. Drafts that the method does
        not propose are verified, too, as vLLM schedules one number for a batch, and
        accepted if they are right.
        """
        if self.unverified is not None:
            return self.unverified.beyond(batch)
        if self.options.drafting[batch.idx_mapping_np].all():
            return None
        max_drafts = self.options.on_device[
            batch.expanded_idx_mapping, Setting.MAX_DRAFTS
        ]
        return (max_drafts == 0) & (batch.expanded_local_pos > 0)
