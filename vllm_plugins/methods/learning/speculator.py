# SPDX-License-Identifier: Apache-2.0
"""Lookups alone, beside which heads are learned from the traffic, and later both.

The drafts have a graph for each of the two, captured at the start, so that nothing of
the heads is paid before they are installed.
"""

import logging
from threading import Thread
from typing import Any

from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_ppd.heads.folder import save_heads
from vllm_ppd.vllm_plugins.config.found import fingerprint_at_hand, learned_folder
from vllm_ppd.vllm_plugins.config.request_options import request_options
from vllm_ppd.vllm_plugins.draft_length.learning import (
    BLOCK,
    HELD,
    Orders,
    Report,
)
from vllm_ppd.vllm_plugins.engine.lookup import LookupDrafter
from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.methods.learning.learner import Learner
from vllm_ppd.vllm_plugins.methods.learning.pairs import Pairs

logger = logging.getLogger("vllm.vllm_ppd")

SAVING = "vllm-ppd saves learned heads"  # name of a thread


class LearningSpeculator(Speculator):
    """Learns, and drives the drafter over what is learned once that is installed."""

    heads: Any  # a LearnedDrafter
    # None: learning has ended
    learner: Learner | None = None
    pairs: Pairs | None = None
    _generation = 0
    lookup_graphs: CudaGraphManager | None = None

    def load_draft_model(self, *args: Any, **kwargs: Any) -> Any:
        super().load_draft_model(*args, **kwargs)
        self.heads = self.drafter
        self.lookups = LookupDrafter()
        self._begin()
        self._use_heads(True)  # until requests come, as they take more memory
        assert self.learner is not None and self.pairs is not None
        sums = [self.learner.gram, self.learner.product]
        parts = [*sums, *sums, *self.pairs.kept]
        taken = sum(part.nbytes for part in parts)
        logger.info(
            "vllm-ppd: learning heads from the traffic takes %.0f MB until it ends; "
            "--no-ppd-learn turns it off",
            taken / 1e6,
        )

    def _begin(self) -> None:
        """Learn from nothing, and draft by lookups alone until then."""
        if self.learner is not None:
            self.learner.slices = iter(())  # they refer to it
        self.learner = None  # frees its memory
        self.pairs = None
        self.pairs = Pairs(
            self.max_num_reqs,
            self.num_speculative_steps,
            self.req_states,
            self.target,
        )
        held = self.pairs.part(self.pairs.size, HELD)
        ranks = get_tp_group().world_size
        layers = max(self.config.num_layers // ranks, 1)
        self.learner = Learner(self.heads, self.target, held, layers)
        self._installed = False
        self._use_heads(False)

    def _use_heads(self, used: bool) -> None:
        self.drafter = self.heads if used else self.lookups
        assert self.lookup is not None
        self.lookup.alone = not used

    def refresh(self) -> None:
        """Drop what was learned, and learn anew from the changed weights."""
        self.heads.refresh()
        self._generation += 1
        self._begin()
        assert self.lookup is not None
        self.lookup.forget()

    # Drafts, of both kinds -------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self.lookup_graphs = self._new_graphs(cudagraph_mode)

    def capture(self) -> None:
        super().capture()
        self._use_heads(False)
        self._capture("looked-up", self.lookup_graphs)
        self._use_heads(True)

    def _graphs_of(self, sampled: bool) -> CudaGraphManager | None:
        if self.drafter is self.lookups:
            return self.lookup_graphs
        return super()._graphs_of(sampled)

    # Learning -------------------------------------------------------------------------

    def add_request(self, row: int, new: Any) -> None:
        super().add_request(row, new)
        if self.pairs is None:
            return
        known = None
        options = request_options(new.sampling_params.extra_args)
        if new.lora_request is None and options.ppd_learn:
            known = len(new.prefill_token_ids)
        self.pairs.add_request(row, new.req_id, known)

    def record(self, *step: Any) -> None:
        if self.pairs is not None:
            self.pairs.record(*step)

    def follow(self, orders: Orders | None) -> Report | None:
        if orders is not None and orders.generation == self._generation:
            self._learn(orders)
        if self.learner is None or self.pairs is None:
            return None
        counts = self.pairs.counts.seen.tolist()
        result = self.learner.result.seen.tolist()
        return Report(self._generation, *counts, *result)

    def _learn(self, orders: Orders) -> None:
        learner = self.learner
        if learner is None or self.pairs is None:
            return
        if orders.install:
            learner.install()
            self._installed = True
            self.counters.add("learned_solutions")
        self._use_heads(self._installed)
        if orders.end:
            self._end(learner.counts)
            return
        if orders.block is not None:
            start = orders.block * BLOCK % self.pairs.size
            learner.use(self.pairs.part(start, BLOCK))
            self.counters.add("learned_positions", BLOCK)
        if orders.solve:
            learner.slices = learner.solve()
        next(learner.slices, None)

    def _end(self, counts: Tensor) -> None:
        """Free the memory, and write the heads in use if the user has named a folder and
        the weights are those that were loaded.
        """
        self.learner = None
        self.pairs = None
        written = self.config.learn_dir and get_tp_group().is_first_rank
        if written and self._installed and not self._generation:
            tensors = self.heads.tensors | {"token_counts": counts}
            Thread(None, self._save, SAVING, [tensors]).start()

    def _save(self, tensors: dict[str, Tensor]) -> None:
        target = fingerprint_at_hand(self.vllm_config.model_config)
        folder = learned_folder(str(self.config.learn_dir), target)
        heads = self.heads.heads.model_copy(update={"fingerprint": target})
        try:
            save_heads(folder, heads, tensors)
        except OSError as error:
            logger.warning(
                "vllm-ppd: learned heads cannot be written to %s (%s)",
                folder,
                error,
            )
