# SPDX-License-Identifier: Apache-2.0
"""Running one stack of the cut outside vLLM's own step: its graph, its buffers and the forward context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context

from vllm_ppd.model_patches.base import CutState, ModelCut, rows_of
from vllm_ppd.vllm_plugins.row_padding import NONE, RowPadding
from vllm_ppd.vllm_plugins.span_attention import LayerGroup, Span, SpanAttention
from vllm_ppd.vllm_plugins.states import flat_ranges


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

    def branches(self, rows: np.ndarray, positions: np.ndarray, state: CutState) -> list[torch.Tensor]:
        """The branches beside the target's last layer over tokens of some requests, each one's in order.

        Those before a request's newest are given no more than their KV.

        Args:
            rows: [tokens] batch row, that of each request's tokens together.
            positions: [tokens] rising within a row, not necessarily by one.
            state: [tokens, hidden].

        Returns:
            Normed hidden states of each branch for the last token of each request, [requests, hidden].
        """
        newest, part = np.append(rows[1:] != rows[:-1], True), len(self.cut.stacks)
        for _ in self._passes(part + 1, rows, positions, state, np.flatnonzero(~newest)):
            pass
        found = []
        for of_pass in self._passes(part, rows, positions, state, np.flatnonzero(newest)):
            # The next pass may run in the same CUDA graph, into the same memory.
            found.append([one.clone() for one in of_pass] if self.cut.junction is not None else of_pass)
        return [torch.cat(of_branch) for of_branch in zip(*found, strict=True)]

    def _passes(
        self, part: int, rows: np.ndarray, positions: np.ndarray, state: CutState, chosen: np.ndarray
    ) -> Iterator[Any]:
        """What a part gives for some tokens [chosen] of those in branches, a pass after the other."""
        of_chosen = rows_of(state, torch.from_numpy(chosen).to(state[0].device))
        most = self.runner.max_num_tokens, self.runner.max_num_reqs
        for tokens, span in consecutive(rows[chosen], positions[chosen], *most):
            yield self._run(part, span, None, rows_of(of_chosen, tokens))

    def _run(self, part: int, span: Span, token_ids: torch.Tensor | None, state: CutState | None) -> Any:
        runner = self.runner
        positions = torch.from_numpy(flat_ranges(span.starts, span.lengths)).to(runner.device, non_blocking=True)
        num_tokens = positions.shape[0]
        mode, descriptor = self._graph(num_tokens)
        padded = self.padding.rows(num_tokens) if descriptor is None else descriptor.num_tokens
        metadata, slots = self.attention.build(self._groups_of(part), span, positions, padded)
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
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=padded,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            slot_mapping=slots,
            is_padding=runner._prepare_padding_mask(num_tokens, padded),
        ):
            if state is None:
                assert token_ids is not None
                output = self.cut.stacks[0](token_ids, positions)
            else:
                output = self.cut.parts[part](positions, *self._padded(state, padded))
        if isinstance(output, torch.Tensor):
            return output[:num_tokens]
        return tuple(None if one is None else one[:num_tokens] for one in output)

    def _padded(self, state: CutState, padded: int) -> CutState:
        junction, num_tokens = self.cut.junction, state[0].shape[0]
        if junction is None:
            hidden, residual = state
            return _zeros_behind(hidden, padded), None if residual is None else _zeros_behind(residual, padded)
        self.cut.at_junction(state)
        if padded > num_tokens:
            junction[0][num_tokens:padded].zero_()
        return junction[0][:padded], None if junction[1] is None else junction[1][:padded]

    def _graph(self, num_tokens: int) -> tuple[CUDAGraphMode, Any]:
        """The captured graph that serves a pass of so many tokens, if there is one."""
        if self.cut.junction is None:
            return CUDAGraphMode.NONE, None
        return self.runner.cudagraph_dispatcher.dispatch(
            num_tokens, valid_modes={CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE}
        )

    def _groups_of(self, part: int) -> list[LayerGroup]:
        """(KV cache group id, attention group, this part's layer names) of each group the part has layers in."""
        if self._groups is None:
            self._groups = []
            for one in range(len(self.cut.parts)):
                found = [
                    (gid, group, self.cut.attention_layers(one, group.layer_names))
                    for gid, groups in enumerate(self.runner.attn_groups)
                    for group in groups
                ]
                self._groups.append([entry for entry in found if entry[2]])
        return self._groups[part]


def _zeros_behind(rows: torch.Tensor, padded: int) -> torch.Tensor:
    """[padded, ...]: the given rows, which are not more, and zeros."""
    more = padded - len(rows)
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]) if more else rows


def consecutive(
    rows: np.ndarray, positions: np.ndarray, most_tokens: int, most_spans: int
) -> Iterator[tuple[slice, Span]]:
    """Tokens that are ordered by row and position, as spans of passes that are not too large.

    Args:
        rows, positions: [tokens]
        most_tokens, most_spans: of a pass.

    Yields:
        Which tokens a pass has, and the spans that they are.
    """
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (rows[1:] != rows[:-1]) | (positions[1:] != positions[:-1] + 1)
    begins[::most_tokens] = True  # a span lies within a pass
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=len(rows))
    part = first // most_tokens
    for one in np.unique(part):
        spans = np.flatnonzero(part == one)
        for some in np.split(spans, range(most_spans, len(spans), most_spans)):
            tokens = slice(int(first[some[0]]), int(first[some[-1]] + lengths[some[-1]]))
            yield tokens, Span(rows[first[some]], positions[first[some]], lengths[some])
