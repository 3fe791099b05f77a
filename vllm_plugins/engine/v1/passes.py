# SPDX-License-Identifier: Apache-2.0
"""Passes of one stack of the cut outside of vLLM's own step: graph, buffers and forward context."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.engine.outside_steps import on_device, unseen_by_connectors

# (KV cache group id, vLLM's attention group, layer names)
LayerGroup = tuple[int, Any, list[str]]


def flat_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, ... (lengths[0] of them), starts[1], ... in one array, int64."""
    if (lengths == 1).all():
        return starts.astype(np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int64)


class Span(NamedTuple):
    """Consecutive tokens of some requests of the batch."""

    rows: np.ndarray  # [requests] batch rows
    starts: np.ndarray  # [requests] position of the first token
    lengths: np.ndarray  # [requests] tokens, at least 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class SpanAttention:
    """Builds the forward context's data for spans of tokens."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def all_layers(self) -> list[LayerGroup]:
        """Every layer of the model with its group."""
        groups = enumerate(self.runner.attn_groups)
        return [(gid, group, group.layer_names) for gid, some in groups for group in some]

    def build(
        self,
        groups: list[LayerGroup],
        span: Span,
        positions: torch.Tensor,  # [tokens]
        padded: int,  # number of slots, at least that of tokens
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and KV slots [padded] by layer name, one block table a KV cache group."""
        runner, device = self.runner, self.runner.device
        num_reqs, num_tokens = len(span.rows), positions.shape[0]
        seq_lens_np = (span.starts + span.lengths).astype(np.int32)
        query_start_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(span.lengths, out=query_start_np[1:])
        seq_lens_cpu, query_start_cpu = torch.from_numpy(seq_lens_np), torch.from_numpy(query_start_np)
        seq_lens = seq_lens_cpu.to(device, non_blocking=True)
        query_start = query_start_cpu.to(device, non_blocking=True)
        all_rows = np.array_equal(span.rows, np.arange(runner.input_batch.num_reqs))
        rows = None if all_rows else torch.from_numpy(span.rows).to(device, non_blocking=True)
        owner = None
        if num_tokens != num_reqs:
            owner = torch.from_numpy(np.repeat(np.arange(num_reqs), span.lengths)).to(device, non_blocking=True)

        metadata: dict[str, Any] = {}
        slots_of_layer: dict[str, torch.Tensor] = {}
        for gid, group, names in groups:
            block_table = runner.input_batch.block_table[gid]
            table = block_table.get_device_tensor(runner.input_batch.num_reqs)
            table = table if rows is None else table.index_select(0, rows)
            blocks = (positions // block_table.block_size)[:, None]
            block_ids = (table if owner is None else table.index_select(0, owner)).gather(1, blocks).squeeze(1)
            slots = torch.full((padded,), PAD_SLOT_ID, dtype=torch.int64, device=device)
            slots[:num_tokens] = block_ids * block_table.block_size + positions % block_table.block_size
            common = CommonAttentionMetadata(
                query_start_loc=query_start,
                query_start_loc_cpu=query_start_cpu,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens_cpu,
                num_reqs=num_reqs,
                num_actual_tokens=num_tokens,
                max_query_len=int(span.lengths.max()),
                max_seq_len=int(seq_lens_np.max()),
                block_table_tensor=table,
                slot_mapping=slots,
                causal=True,
                is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
                positions=positions,
            )
            built = group.build_metadata(common)
            for name in names:
                metadata[name] = built
                slots_of_layer[name] = slots
        return metadata, slots_of_layer


class StackPasses:
    """Runs stacks of a ModelCut over spans of tokens, writing their KV into the target's own paged cache."""

    def __init__(self, runner: Any, cut: ModelCut) -> None:
        self.runner = runner
        self.cut = cut
        self.attention = SpanAttention(runner)
        self._groups: list[list[LayerGroup]] | None = None

    def zeros(self, tokens: int) -> CutState:
        """Zero states for a number of tokens."""
        model_config = self.runner.model_config
        shape, dtype = (tokens, model_config.hf_text_config.hidden_size), model_config.dtype
        hidden = torch.zeros(shape, dtype=dtype, device=self.runner.device)
        return hidden, torch.zeros_like(hidden) if self.cut.adapter.has_residual else None

    def first(self, span: Span, token_ids: torch.Tensor, within_step: bool = False) -> CutState:
        """Stack 0 over a span: [tokens] ids to the state at the first exit.

        Within a step of vLLM no CUDA graph runs, since its input buffers hold the step's own inputs.
        """
        # Compiled stacks have no guards: ids need exactly the layout of vLLM's.
        return self._run(0, span, token_ids.to(torch.int32).contiguous(), None, graphs=not within_step)

    def deeper(self, level: int, span: Span, state: CutState) -> CutState:
        """A middle stack over a span, from the state at the exit before it."""
        return self._run(level, span, None, state)

    def final(self, span: Span, state: CutState) -> torch.Tensor:
        """The target's last stack over a span: normed hidden states [tokens, hidden]."""
        return self._run(len(self.cut.stacks) - 1, span, None, state)

    def _run(
        self,
        level: int,
        span: Span,
        token_ids: torch.Tensor | None,
        state: CutState | None,
        graphs: bool = True,  # whether graphs may be used; not within vLLM's steps
    ) -> Any:
        runner = self.runner
        positions = torch.from_numpy(flat_ranges(span.starts, span.lengths)).to(runner.device, non_blocking=True)
        num_tokens = positions.shape[0]
        mode, descriptor = self._graph(num_tokens) if graphs else (CUDAGraphMode.NONE, None)
        padded = num_tokens if descriptor is None else descriptor.num_tokens
        metadata, slots = self.attention.build(self._groups_of(level), span, positions, padded)
        if mode != CUDAGraphMode.NONE:
            # A captured graph reads its inputs where vLLM keeps them.
            runner.positions[:num_tokens].copy_(positions)
            positions = runner.positions[:padded]
            if token_ids is not None:
                runner.input_ids.gpu[:num_tokens].copy_(token_ids)
                token_ids = runner.input_ids.gpu[:padded]
        embeddings = self.cut.embeddings(token_ids) if token_ids is not None else None
        if embeddings is not None and mode != CUDAGraphMode.NONE:
            embeddings = runner.inputs_embeds.gpu[:padded].copy_(embeddings)
        # Connectors store what a step computes, but not drafts computed between steps.
        with (
            unseen_by_connectors() if graphs else nullcontext(),
            set_forward_context(
                metadata,
                runner.vllm_config,
                num_tokens=padded,
                cudagraph_runtime_mode=mode,
                batch_descriptor=descriptor,
                slot_mapping=slots,
                is_padding=runner._prepare_padding_mask(num_tokens, padded),
            ),
        ):
            if state is None:
                assert token_ids is not None
                output = self.cut.start(self.cut.stacks[0], token_ids, positions, embeddings)
            else:
                output = self.cut.stacks[level](positions, *self._padded(state, padded))
        if isinstance(output, torch.Tensor):
            return output[:num_tokens]
        return tuple(None if values is None else values[:num_tokens] for values in output)

    def _padded(self, state: CutState, padded: int) -> CutState:
        graph_buffers, num_tokens = self.cut.graph_buffers, state[0].shape[0]
        if graph_buffers is None:
            return state
        self.cut.in_graph_buffers(state)
        if padded > num_tokens:
            graph_buffers[0][num_tokens:padded].zero_()
        return graph_buffers[0][:padded], None if graph_buffers[1] is None else graph_buffers[1][:padded]

    def _graph(self, num_tokens: int) -> tuple[CUDAGraphMode, Any]:
        """The captured graph for a pass of a number of tokens, if there is one."""
        if self.cut.graph_buffers is None:
            return CUDAGraphMode.NONE, None
        return self.runner.cudagraph_dispatcher.dispatch(
            num_tokens, valid_modes={CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE}
        )

    def _groups_of(self, level: int) -> list[LayerGroup]:
        """(KV cache group id, attention group, this stack's layer names) of each group the stack has layers in."""
        if self._groups is None:
            if not current_platform.is_cpu():
                on_device(group for groups in self.runner.attn_groups for group in groups)
            self._groups = []
            for stack in range(len(self.cut.stacks)):
                layers = [
                    (gid, group, self.cut.attention_layers(stack, group.layer_names))
                    for gid, groups in enumerate(self.runner.attn_groups)
                    for group in groups
                ]
                self._groups.append([entry for entry in layers if entry[2]])
        return self._groups[level]
