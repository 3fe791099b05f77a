# SPDX-License-Identifier: Apache-2.0
"""Lookups alone, beside which heads are learned from the traffic, and later both.

The drafts have a graph for each of the two, captured at the start, so that nothing of
the heads is paid before they are installed.
"""

import logging
from collections.abc import Iterable
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_ppd.kernels.staging import StepEnd
from vllm_ppd.vllm_plugins.config.request_options import request_options
from vllm_ppd.vllm_plugins.draft_length.learning import BLOCK, Orders, Report
from vllm_ppd.vllm_plugins.engine.drafter import Drafter
from vllm_ppd.vllm_plugins.engine.lookup import LookupDrafter
from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.methods.learning.drafter import LearnedDrafter
from vllm_ppd.vllm_plugins.methods.learning.learner import Learner
from vllm_ppd.vllm_plugins.methods.learning.pairs import Pairs

logger = logging.getLogger("vllm.vllm_ppd")


class LearningSpeculator(Speculator):
    """Learns, and drives the drafter over what is learned once that is installed."""

    heads: LearnedDrafter
    # None: learning has ended
    learner: Learner | None = None
    pairs: Pairs | None = None

    def load_draft_model(self, *args: Any, **kwargs: Any) -> Any:
        super().load_draft_model(*args, **kwargs)
        assert isinstance(self.drafter, LearnedDrafter)
        self.heads = self.drafter
        self.lookups = LookupDrafter()
        self._begin()
        assert self.learner is not None and self.pairs is not None
        taken = self.learner.nbytes + self.pairs.nbytes
        logger.info(
            "vllm-ppd: learning heads from the traffic takes %.0f MB until it ends; "
            "--no-ppd-learn turns it off",
            taken / 1e6,
        )

    def _begin(self, generation: int = 0) -> None:
        """Learn from nothing, and draft by lookups alone until then."""
        self.learner = None  # frees its memory
        self.pairs = None
        self.pairs = Pairs(
            self.max_num_reqs,
            self.num_speculative_steps,
            self.req_states,
            self.target,
        )
        self.learner = Learner(
            self.heads, self.target, self.pairs.held_out(), generation
        )
        self._generation = generation
        self._use_heads(False)

    def _use_heads(self, used: bool) -> None:
        self.drafter: Drafter = self.heads if used else self.lookups
        assert self.lookup is not None
        self.lookup.alone = not used

    @property
    def uses_heads(self) -> bool:
        return self.drafter is self.heads

    def refresh(self) -> None:
        """Drop what was learned, and learn anew from the changed weights."""
        self.heads.refresh()
        self._begin(self._generation + 1)
        assert self.lookup is not None
        self.lookup.forget()

    # Drafts, of both kinds -------------------------------------------------------------

    def _warm_up(self, sizes: Iterable[int]) -> None:
        before = self.uses_heads
        sizes = list(sizes)
        for used in (True, False):
            self._use_heads(used)
            super()._warm_up(sizes)
        self._use_heads(before)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self.lookup_graphs = self._new_graphs(cudagraph_mode)

    def capture(self) -> None:
        self._use_heads(True)
        super().capture()
        self._use_heads(False)
        self._capture("looked-up", self.lookup_graphs)

    def _graphs_of(self, sampled: bool) -> CudaGraphManager | None:
        if self.uses_heads:
            return super()._graphs_of(sampled)
        return self.lookup_graphs

    def _run(
        self, requests: int, sampled: bool, end: StepEnd | None = None
    ) -> None:
        super()._run(requests, sampled and self.uses_heads, end)

    # Learning -------------------------------------------------------------------------

    def add_request(self, row: int, new: Any) -> None:
        super().add_request(row, new)
        if self.pairs is None:
            return
        params = new.sampling_params
        known = None
        learned = params is not None and new.lora_request is None
        if learned and request_options(params.extra_args).ppd_learn:
            known = len(new.prefill_token_ids)
        self.pairs.add_request(row, new.req_id, known)

    def record(self, *step: Any) -> None:
        if self.pairs is not None:
            self.pairs.record(*step)

    def follow(self, orders: Orders) -> None:
        learner = self.learner
        if learner is None or orders.generation != learner.generation:
            return
        assert self.pairs is not None
        if orders.install:
            learner.install()
            self._use_heads(True)
            self.counters.add("learned_solutions")
        if orders.end:
            self.learner = None
            self.pairs = None
            return
        if orders.block is not None:
            learner.use(self.pairs.block(orders.block))
            self.counters.add("learned_positions", BLOCK)
        if orders.solve:
            learner.solve()
        learner.work()

    def report(self) -> Report | None:
        if self.learner is None or self.pairs is None:
            return None
        return self.learner.report(*self.pairs.counts.seen.tolist())
