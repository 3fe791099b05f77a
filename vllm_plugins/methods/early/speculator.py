# SPDX-License-Identifier: Apache-2.0
"""Early drafting on runner V2: the target runs from saved states if possible, in
separate CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_ppd.vllm_plugins.engine.passes import FirstStackPasses
from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import (
    DeferredKV,
    DeferredKVCut,
    SavedStates,
    ScheduledStep,
)


class DeferredKVSpeculator(Speculator):
    """Runs the first stack for the drafter, keeps its states, and completes the
    deferred KV in the next step.
    """

    cut: DeferredKVCut
    deferred: DeferredKV
    deep_graphs: ModelCudaGraphManager | None = None

    # The target -----------------------------------------------------------------------

    def load_draft_model(
        self, target_model: Any, target_attn_layer_names: set[str]
    ) -> Any:
        super().load_draft_model(target_model, target_attn_layer_names)
        cut = self.target.cut
        assert isinstance(cut, DeferredKVCut)
        self.cut = cut
        rows = self.max_num_reqs
        drafts = self.num_speculative_steps
        states = (rows + 1) * (drafts + 1)
        target = self.target
        saved = SavedStates(
            states,
            target.hidden_size,
            target.dtype,
            target.device,
            cut.adapter.has_residual,
        )
        self.deferred = DeferredKV(
            rows, drafts, target.max_tokens, saved, self.counters
        )
        self.passes = FirstStackPasses(self, cut)
        cut.deferred = self.deferred
        cut.passes = self.passes
        self.first_stack = cut

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Set metadata builders for the first stack's layers: the target's own, and its
        KV cache.
        """
        names = [
            name
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        ]
        self.draft_attn_layer_names = set(self.cut.attention_layers(0, names))
        super(Speculator, self).set_attn(
            model_state, kv_cache_config, block_tables, *args, **kwargs
        )
        self.draft_attn_layer_names = set()
        self.passes.bind(kv_cache_config, block_tables)

    # Graphs ---------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(
            cudagraph_mode if self.passes.capturable else CUDAGraphMode.NONE
        )
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.deep_graphs = ModelCudaGraphManager(
            self.vllm_config, self.device, mode, self.deferred.width
        )

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The object that runs whole-model graphs: vLLM's own, or that of the deep pass
        for the same shape.
        """

        def run_fullgraph(desc: Any) -> Any:
            if (
                self.deferred.mode == "deep"
                and self.deep_graphs is not None
                and desc in self.deep_graphs.graphs
            ):
                return self.deep_graphs.run_fullgraph(desc)
            return stock(desc)  # a full forward is right for every step

        return run_fullgraph

    def capture(self) -> None:
        super().capture()
        runner = self.runner
        graphs = self.deep_graphs
        if graphs is None or not graphs.needs_capture():
            return
        self.deferred.mode = "deep"
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

    def prepare_capture(self, requests: int) -> None:
        super().prepare_capture(requests)
        self.passes.prepare_capture(requests)

    # A step ---------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        super().add_request(row, params)
        self.deferred.drafted[row] = False

    def begin_step(self, batch: Any) -> None:
        drafts = batch.num_draft_tokens_per_req
        tokens = batch.num_scheduled_tokens
        step = ScheduledStep(
            batch.idx_mapping_np,
            tokens,
            np.zeros_like(tokens) if drafts is None else drafts,
            batch.is_prefilling_np,
            batch.num_tokens_after_padding,
        )
        # Token IDs do not describe the content of a multimodal prompt.
        self.deferred.begin_step(step, may_mix=not self.cut.embedded)
        if self.deferred.mode == "mixed":
            self.passes.begin_step(batch)

    def end_step(self) -> None:
        self.deferred.end_step()

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.passes.begin_drafting(
            input_batch, bool(kwargs.get("skip_attn_for_dummy_run"))
        )
        drafts = super().propose(input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            ends = (
                input_batch.num_computed_prefill_tokens_np
                + input_batch.num_scheduled_tokens
            )
            self.deferred.drafted[input_batch.idx_mapping_np] = (
                ends >= input_batch.prefill_len_np
            )
        return drafts
