# SPDX-License-Identifier: Apache-2.0
"""Early drafting on runner V2: the shallow passes between steps, and the deep pass that completes their KV.

States lie by request row on the device, K + 1 a request: of the newest token and of each draft. Whether a step takes
them is told from the schedule alone, so that every rank goes the same way and none waits for a token's value:

    deep    every request decodes and was drafted for: the last stack alone
    mixed   some do, and prompts join: the first stack over the tokens without a state, the last one over all
    full    vLLM's own forward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.v2.passes import FirstStackPasses
from vllm_ppd.vllm_plugins.engine.v2.speculator import Speculator
from vllm_ppd.vllm_plugins.engine.v2.staging import Kind

Mode = Literal["deep", "mixed", "full"]


class DeferredKVSpeculator(Speculator):
    """Runs the first stack for the drafter, keeps its states, and completes the deferred KV in the next step."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.width = self.num_drafts + 1
        self.nobody = self.max_num_reqs * self.width  # the first of the rows that padding takes
        self.mode: Mode = "full"  # of the step that runs now
        self.drafted = np.zeros(self.max_num_reqs, dtype=bool)  # request rows whose states the next step may take
        self.state_rows = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)  # of the step's tokens
        self.fresh = np.zeros(0, dtype=np.int64)  # requests of the batch without states, in a mixed step
        self.deep_graphs: ModelCudaGraphManager | None = None

    # The target ------------------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        loaded = super().load_draft_model(target_model, target_attn_layer_names)
        self.cut = self.target.cut
        self.whole, self.cut.forward = self.cut.forward, self.forward  # type: ignore[method-assign]
        # The last request's rows take what padding writes.
        rows = (self.max_num_reqs + 1) * self.width
        self.hidden = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        self.residual = torch.zeros_like(self.hidden) if self.cut.adapter.has_residual else None
        self.passes = FirstStackPasses(self)
        return loaded

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any, **kwargs: Any) -> None:
        """Metadata builders for the first stack's layers: the target's own, and its KV cache."""
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self.draft_attn_layer_names = set(self.cut.attention_layers(0, names))
        super(Speculator, self).set_attn(model_state, kv_cache_config, block_tables, *args, **kwargs)
        self.draft_attn_layer_names = set()
        self.passes.bind(kv_cache_config, block_tables)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        state: CutState | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | CutState:
        """The target's forward, in place of ModelCut.forward."""
        if self.mode == "full":
            return self.whole(input_ids, positions, state, inputs_embeds)
        rows = self.state_rows[: len(positions)]
        saved: CutState = (
            self.hidden.index_select(0, rows),
            None if self.residual is None else self.residual.index_select(0, rows),
        )
        if self.mode == "mixed":
            assert input_ids is not None  # of a multimodal model, which runs on V1
            tokens, made = self.passes.of_requests(self.fresh, input_ids, positions)
            for store, values in zip(saved, made, strict=True):
                if store is not None and values is not None:
                    store.index_copy_(0, tokens, values)
        return self.cut.stacks[-1](positions, *self.cut.in_graph_buffers(saved))

    # Graphs ----------------------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode if self.passes.capturable else CUDAGraphMode.NONE)
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.deep_graphs = ModelCudaGraphManager(
            self.vllm_config, self.device, mode, self.width, varlen_decode=self.enable_adaptive_verification
        )

    def graphs_of(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What runs the target's whole-model graphs: vLLM's own, or that of the deep pass for the same shape."""

        def run_fullgraph(desc: Any) -> Any:
            if self.mode == "deep" and self.deep_graphs is not None and desc in self.deep_graphs.graphs:
                return self.deep_graphs.run_fullgraph(desc)
            return stock(desc)  # a full forward is right for every step

        return run_fullgraph

    def capture(self) -> None:
        super().capture()
        runner, graphs = self.runner, self.deep_graphs
        if graphs is None or not graphs.needs_capture():
            return
        self.mode = "deep"
        self.state_rows.zero_()
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
            self.mode = "full"

    def _captured(self, kind: Kind) -> Callable[..., Callable[[CUDAGraphMode], None]]:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            self.staging.clear()
            self.passes.prepare_capture(desc.num_tokens)
            return lambda mode: self.draft(desc.num_tokens, kind)

        return create

    # A step ----------------------------------------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        super().add_request(row, params)
        self.drafted[row] = False

    def begin_step(self, batch: Any) -> None:
        """Tell from the schedule which tokens have states."""
        rows, tokens = batch.idx_mapping_np, batch.num_scheduled_tokens
        drafts = batch.num_draft_tokens_per_req
        # The newest token and the drafts, and nothing else: each has logits of its own.
        known = self.drafted[rows] & ~batch.is_prefilling_np & (tokens == (1 if drafts is None else drafts + 1))
        self.drafted[rows] = False
        self.mode = "deep" if known.all() else "mixed" if known.any() else "full"
        if self.mode == "mixed" and self.enable_adaptive_verification:
            self.mode = "full"  # where each request's tokens are is known on the device alone
        self.counters.add("fallback_steps" if self.mode == "full" else "deferred_steps")
        if self.mode == "deep":
            taken, padded = batch.num_tokens, batch.num_tokens_after_padding
            self.state_rows[:taken] = batch.expanded_idx_mapping * self.width + batch.expanded_local_pos
            self.state_rows[taken:padded] = self.nobody
        elif self.mode == "mixed":
            self._choose_fresh(batch, known)

    def _choose_fresh(self, batch: Any, known: np.ndarray) -> None:
        """Note which tokens of a mixed step have states, and which requests have none."""
        rows, tokens = batch.idx_mapping_np, batch.num_scheduled_tokens
        self.fresh = np.flatnonzero(~known)
        starts = np.cumsum(tokens) - tokens
        offsets = np.arange(tokens.sum()) - np.repeat(starts, tokens)
        of_tokens = np.full(batch.num_tokens_after_padding, self.nobody, dtype=np.int64)
        taken = np.repeat(known, tokens)
        of_tokens[: len(taken)][taken] = (np.repeat(rows, tokens) * self.width + offsets)[taken]
        async_tensor_h2d(of_tokens, out=self.state_rows[: len(of_tokens)])
        self.passes.choose(batch, self.fresh, starts)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.mode = "full"  # of dummy steps, which have no begin_step
        dummy = bool(kwargs.get("dummy_run"))
        self.passes.begin(input_batch, bool(kwargs.get("skip_attn_for_dummy_run")))
        drafts = super().propose(input_batch, *args, **kwargs)
        if not dummy:
            ends = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
            self.drafted[input_batch.idx_mapping_np] = ends >= input_batch.prefill_len_np
        return drafts

    def shallow(self, offset: int, token_ids: torch.Tensor) -> CutState:
        """DraftInputs.run_shallow for the staged requests."""
        requests = len(token_ids)
        rows = self.staging.rows[:requests]
        state = self.passes.one_token(offset, token_ids, rows, self.staging.positions[:requests])
        into = torch.where(rows < 0, self.max_num_reqs, rows) * self.width + offset
        for store, values in zip((self.hidden, self.residual), state, strict=True):
            if store is not None and values is not None:
                store[into] = values  # a copy: norms overwrite what they are given
        return state
