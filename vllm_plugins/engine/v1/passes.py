# SPDX-License-Identifier: Apache-2.0
"""Running one stack of the cut outside vLLM's own step: its graph, its buffers and the forward context."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.engine.attention_backends import on_device
from vllm_ppd.vllm_plugins.engine.cpu.row_padding import NONE, RowPadding
from vllm_ppd.vllm_plugins.engine.kv_connector import unseen_by_connectors
from vllm_ppd.vllm_plugins.engine.v1.span_attention import LayerGroup, Span, SpanAttention, flat_ranges


class StackPasses:
    """Runs stacks of a ModelCut over spans of tokens, writing their KV into the target's own paged cache."""

    def __init__(self, runner: Any, cut: ModelCut, padding: RowPadding = NONE) -> None:
        self.runner = runner
        self.cut = cut
        self.padding = padding
        self.attention = SpanAttention(runner)
        self._groups: list[list[LayerGroup]] | None = None

    def first(self, span: Span, token_ids: torch.Tensor) -> CutState:
        """Stack 0 over a span: [tokens] ids to the state at the first exit."""
        # Compiled stacks have no guards: ids must look exactly as vLLM's own do.
        return self._run(0, span, token_ids.to(torch.int32).contiguous(), None)

    def deeper(self, level: int, span: Span, state: CutState) -> CutState:
        """A middle stack over a span, from the state at the exit before it."""
        return self._run(level, span, None, state)

    def final(self, span: Span, state: CutState) -> torch.Tensor:
        """The target's last stack over a span: normed hidden states [tokens, hidden]."""
        return self._run(len(self.cut.stacks) - 1, span, None, state)

    def _run(self, level: int, span: Span, token_ids: torch.Tensor | None, state: CutState | None) -> Any:
        runner = self.runner
        positions = torch.from_numpy(flat_ranges(span.starts, span.lengths)).to(runner.device, non_blocking=True)
        num_tokens = positions.shape[0]
        mode, descriptor = self._graph(num_tokens)
        padded = self.padding.rows(num_tokens) if descriptor is None else descriptor.num_tokens
        metadata, slots = self.attention.build(self._groups_of(level), span, positions, padded)
        if mode != CUDAGraphMode.NONE:
            # A captured graph reads its inputs where vLLM keeps them.
            runner.positions[:num_tokens].copy_(positions)
            positions = runner.positions[:padded]
            if token_ids is not None:
                runner.input_ids.gpu[:num_tokens].copy_(token_ids)
                token_ids = runner.input_ids.gpu[:padded]
        elif padded > num_tokens:
            positions = _zeros_behind(positions, padded)
            token_ids = None if token_ids is None else _zeros_behind(token_ids, padded)
        embeddings = self.cut.embeddings(token_ids) if token_ids is not None else None
        if embeddings is not None and mode != CUDAGraphMode.NONE:
            embeddings = runner.inputs_embeds.gpu[:padded].copy_(embeddings)
        with (
            unseen_by_connectors(),
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
        return tuple(None if one is None else one[:num_tokens] for one in output)

    def _padded(self, state: CutState, padded: int) -> CutState:
        graph_buffers, num_tokens = self.cut.graph_buffers, state[0].shape[0]
        if graph_buffers is None:
            hidden, residual = state
            return _zeros_behind(hidden, padded), None if residual is None else _zeros_behind(residual, padded)
        self.cut.in_graph_buffers(state)
        if padded > num_tokens:
            graph_buffers[0][num_tokens:padded].zero_()
        return graph_buffers[0][:padded], None if graph_buffers[1] is None else graph_buffers[1][:padded]

    def _graph(self, num_tokens: int) -> tuple[CUDAGraphMode, Any]:
        """The captured graph that serves a pass of so many tokens, if there is one."""
        if self.cut.graph_buffers is None:
            return CUDAGraphMode.NONE, None
        return self.runner.cudagraph_dispatcher.dispatch(
            num_tokens, valid_modes={CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE}
        )

    def _groups_of(self, level: int) -> list[LayerGroup]:
        """(KV cache group id, attention group, this stack's layer names) of each group the stack has layers in."""
        if self._groups is None:
            if not current_platform.is_cpu():
                on_device(group.backend.get_name() for groups in self.runner.attn_groups for group in groups)
            self._groups = []
            for one in range(len(self.cut.stacks)):
                found = [
                    (gid, group, self.cut.attention_layers(one, group.layer_names))
                    for gid, groups in enumerate(self.runner.attn_groups)
                    for group in groups
                ]
                self._groups.append([entry for entry in found if entry[2]])
        return self._groups[level]


def _zeros_behind(rows: torch.Tensor, padded: int) -> torch.Tensor:
    """[padded, ...]: the given rows, which are not more, and zeros."""
    more = padded - len(rows)
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]) if more else rows
