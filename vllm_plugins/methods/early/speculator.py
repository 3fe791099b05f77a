# SPDX-License-Identifier: Apache-2.0
"""Early drafting on runner V2: the target runs from saved states if possible, in
separate CUDA graphs.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_ppd.vllm_plugins.engine.speculator import Speculator, decode_only
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import (
    DeferredKV,
    SavedStates,
)
from vllm_ppd.vllm_plugins.methods.early.drafter import EarlyExitDrafter
from vllm_ppd.vllm_plugins.methods.early.passes import ShallowPasses, on_device

logger = logging.getLogger("vllm.vllm_ppd")


class GraphsByExit(dict[Any, Any]):
    """The CUDA graphs of one of vLLM's managers, for the current exit.

    vLLM drops the managers of its memory profile by name, so each kind of graph has
    one manager for all exits.

    Args:
        current: gives the index of the exit.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self.current = current

    def __setitem__(self, desc: Any, graph: Any) -> None:
        super().__setitem__((self.current(), desc), graph)

    def __getitem__(self, desc: Any) -> Any:
        return super().__getitem__((self.current(), desc))

    def __contains__(self, desc: Any) -> bool:
        return super().__contains__((self.current(), desc))


class DeferredKVSpeculator(Speculator):
    """Runs the layers before an exit for the drafter, keeps their states, and completes
    the deferred KV in the next step.
    """

    drafter: EarlyExitDrafter
    deferred: DeferredKV
    deep_graphs: ModelCudaGraphManager | None = None

    # The target -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Also forget states of the former weights."""
        super().refresh()
        self.deferred.drafted[:] = False

    def load_draft_model(self, *args: Any) -> Any:
        super().load_draft_model(*args)
        cut = self.cut = self.drafter.cut
        rows = self.max_num_reqs
        drafts = self.num_speculative_steps
        target = self.target
        saved = SavedStates(
            (rows + 1) * (drafts + 1),
            target.hidden_size,
            target.dtype,
            target.device,
            cut.adapter.has_residual,
        )
        self.deferred = DeferredKV(
            rows, drafts, target.max_tokens, saved, self.counters
        )
        self.passes = ShallowPasses(self, cut)
        cut.deferred = self.deferred
        cut.passes = self.passes

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, *args: Any
    ) -> None:
        """Set metadata builders for the layers before the last exit: the target's own,
        and its KV cache.
        """
        names = [
            name
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        ]
        for level in range(len(self.cut.exit_layers)):
            layers = self.cut.attention_layers(level, names)
            self.draft_attn_layer_names.update(layers)
        super(Speculator, self).set_attn(model_state, kv_cache_config, *args)
        self.draft_attn_layer_names = set()
        self.passes.capturable = on_device(
            group for groups in self.attn_groups for group in groups
        )

    # Graphs ---------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        capturable = self.passes.capturable
        super().init_cudagraph_manager(
            cudagraph_mode if capturable else CUDAGraphMode.NONE
        )
        self.deep_graphs = ModelCudaGraphManager(
            self.vllm_config,
            self.device,
            decode_only(cudagraph_mode),
            self.deferred.width,
        )
        for manager in (self.graphs, self.sampled_graphs):
            if manager is not None:
                manager.graphs = GraphsByExit(lambda: self.cut.exit)
        self.deep_graphs.graphs = GraphsByExit(lambda: self.deferred.exit)

    def capture(self) -> None:
        """Capture the drafts, and the deep pass for the shapes of vLLM's own graphs of
        the whole model, in whose place it then runs.

        The first exit always has graphs. Others have theirs while twice the memory that
        the first one's took is left.
        """
        graphs = self.deep_graphs
        if graphs is not None and not graphs.needs_capture():
            graphs = None
        before = free_memory()
        needed = 0
        for exit, layer in enumerate(self.cut.exit_layers):
            if free_memory() < 2 * needed:
                logger.warning(
                    "vllm-ppd: not enough memory for CUDA graphs of exit layer %d, which "
                    "drafts without them; lower --gpu-memory-utilization or "
                    "--max-num-seqs, or remove the layer",
                    layer,
                )
                break
            self.cut.exit = exit
            self.deferred.exit = exit
            super().capture()
            if graphs is not None:
                self._capture_deep(graphs)
            needed = needed or before - free_memory()
        self.cut.exit = 0
        self.deferred.exit = 0
        if graphs is not None:
            self._replay_deep(graphs)

    def _capture_deep(self, graphs: ModelCudaGraphManager) -> None:
        """Capture the deep pass behind the current exit."""
        runner = self.runner
        self.deferred.deep = True
        self.deferred.state_rows.zero_()
        try:
            graphs.capture(
                runner.model,
                runner.model_state,
                runner.input_buffers,
                None,
                self.block_tables,
                runner.attn_groups,
                self.kv_cache_config,
                progress_bar_desc="Capturing the deep pass",
            )
        finally:
            self.deferred.end_step()

    def _replay_deep(self, graphs: ModelCudaGraphManager) -> None:
        """Have deep steps replay their graphs in place of the whole model's."""
        stock = self.runner.cudagraph_manager.run_fullgraph

        def run_fullgraph(desc: Any) -> Any:
            if self.deferred.deep and desc in graphs.graphs:
                return graphs.run_fullgraph(desc)
            return stock(desc)  # a full forward is right for every step

        self.runner.cudagraph_manager.run_fullgraph = run_fullgraph

    def stage_padding(self, requests: int) -> None:
        super().stage_padding(requests)
        self.passes.begin_drafting(None)
        # Requests whose blocks are vLLM's null block
        self.block_tables.get_dummy_block_tables(requests)

    # A step ---------------------------------------------------------------------------

    def add_request(self, row: int, new: Any) -> None:
        super().add_request(row, new)
        self.deferred.drafted[row] = False

    def read_at(self, exit: int) -> None:
        self.cut.exit = exit

    def begin_step(self, batch: Any) -> None:
        self.deferred.begin_step(batch)

    def end_step(self) -> None:
        self.deferred.end_step()

    def propose(
        self, input_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        batch = input_batch
        self.passes.begin_drafting(
            batch.seq_lens_cpu_upper_bound,
            kwargs.get("skip_attn_for_dummy_run", False),
        )
        drafts = super().propose(batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            read = batch.num_computed_prefill_tokens_np
            read = read + batch.num_scheduled_tokens
            self.deferred.note_drafted(
                batch.idx_mapping_np, read >= batch.prefill_len_np, self.cut.exit
            )
        return drafts


def free_memory() -> int:
    """Bytes that are free on the first tensor-parallel rank's device."""
    free = torch.accelerator.get_memory_info()[0]
    return get_tp_group().broadcast_object(free)
