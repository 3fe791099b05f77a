# SPDX-License-Identifier: Apache-2.0
"""Running one stack of the cut outside vLLM's own step: attention metadata, KV slots and the forward context."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.states import flat_ranges


class Span(NamedTuple):
    """Consecutive tokens of some requests of the batch."""

    rows: np.ndarray  # [requests] batch rows
    starts: np.ndarray  # [requests] position of the first token
    lengths: np.ndarray  # [requests] tokens, at least 1
    tails: np.ndarray | None = None  # [requests, KV cache groups] block in place of the one of the token; -1: its own

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class StackPasses:
    """Runs stacks of a ModelCut over spans of tokens, writing their KV into the target's own paged cache."""

    def __init__(self, runner: Any, cut: ModelCut) -> None:
        self.runner = runner
        self.cut = cut
        self._groups: list[list[tuple[int, Any, list[str]]]] | None = None

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
        padded = num_tokens if descriptor is None else descriptor.num_tokens
        metadata, slots = self._attention(level, span, positions, padded)
        if mode != CUDAGraphMode.NONE:
            # A captured graph reads its inputs where vLLM keeps them.
            runner.positions[:num_tokens].copy_(positions)
            positions = runner.positions[:padded]
            if token_ids is not None:
                runner.input_ids.gpu[:num_tokens].copy_(token_ids)
                token_ids = runner.input_ids.gpu[:padded]
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
                output = self.cut.stacks[level](positions, *self._padded(state, padded))
        if isinstance(output, torch.Tensor):
            return output[:num_tokens]
        hidden, residual = output
        return hidden[:num_tokens], None if residual is None else residual[:num_tokens]

    def _padded(self, state: CutState, padded: int) -> CutState:
        junction, num_tokens = self.cut.junction, state[0].shape[0]
        if junction is None:
            return state
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

    def _attention(
        self, level: int, span: Span, positions: torch.Tensor, padded: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and KV slots of the stack's layers, one block table a KV cache group."""
        runner, device = self.runner, self.runner.device
        num_reqs, num_tokens = len(span.rows), positions.shape[0]
        seq_lens_np = (span.starts + span.lengths).astype(np.int32)
        query_start_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(span.lengths, out=query_start_np[1:])
        seq_lens_cpu, query_start_cpu = torch.from_numpy(seq_lens_np), torch.from_numpy(query_start_np)
        seq_lens = seq_lens_cpu.to(device, non_blocking=True)
        query_start = query_start_cpu.to(device, non_blocking=True)
        all_rows = span.tails is None and np.array_equal(span.rows, np.arange(runner.input_batch.num_reqs))
        rows = None if all_rows else torch.from_numpy(span.rows).to(device, non_blocking=True)
        owner = None
        if num_tokens != num_reqs:
            owner = torch.from_numpy(np.repeat(np.arange(num_reqs), span.lengths)).to(device, non_blocking=True)

        metadata: dict[str, Any] = {}
        slots_of_layer: dict[str, torch.Tensor] = {}
        for gid, group, names in self._groups_of(level):
            block_table = runner.input_batch.block_table[gid]
            table = block_table.get_device_tensor(runner.input_batch.num_reqs)
            table = table if rows is None else table.index_select(0, rows)
            if span.tails is not None:
                self._put_tails(table, span, gid, block_table.block_size)
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

    def _put_tails(self, table: torch.Tensor, span: Span, gid: int, block_size: int) -> None:
        """Write the given tail blocks into a copy of the block tables [requests, blocks]."""
        assert span.tails is not None
        given = np.flatnonzero(span.tails[:, gid] >= 0)
        columns = span.starts[given] // block_size
        where = tuple(torch.from_numpy(part).to(table.device, non_blocking=True) for part in (given, columns))
        blocks = torch.from_numpy(span.tails[given, gid]).to(table.device, table.dtype, non_blocking=True)
        table.index_put_(where, blocks)

    def _groups_of(self, level: int) -> list[tuple[int, Any, list[str]]]:
        """(KV cache group id, attention group, this stack's layer names) of each group the stack has layers in."""
        if self._groups is None:
            self._groups = []
            for stack in range(len(self.cut.stacks)):
                found = [
                    (gid, group, self.cut.attention_layers(stack, group.layer_names))
                    for gid, groups in enumerate(self.runner.attn_groups)
                    for group in groups
                ]
                self._groups.append([entry for entry in found if entry[2]])
        return self._groups[level]
