# SPDX-License-Identifier: Apache-2.0
"""Attention metadata and KV slots of tokens that run outside vLLM's own step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

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
    tails: np.ndarray | None = None  # [requests, KV cache groups] block in place of the one of the token; -1: its own

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class SpanAttention:
    """Builds what the forward context needs for spans of tokens."""

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
        padded: int,  # slots to give, at least as many as tokens
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
        all_rows = span.tails is None and np.array_equal(span.rows, np.arange(runner.input_batch.num_reqs))
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
