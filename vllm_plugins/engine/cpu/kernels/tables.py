# SPDX-License-Identifier: Apache-2.0
"""Kernels of buffer_utils.py, block_table.py and worker/utils.py: writes, block tables, slots."""

import ctypes
from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import table_at

INT32_BYTES = 4


def apply_write(
    # [rows] or [rows, columns]; with MULTI_GROUP [groups], addresses of tables
    output: torch.Tensor,
    output_stride: Any,  # int; with MULTI_GROUP [groups], the tables' columns
    rows: torch.Tensor,  # [writes]
    starts: torch.Tensor,  # [writes] first column
    contents: torch.Tensor,  # [values] of all writes
    cu_lens: torch.Tensor,  # [writes] where each write's values end
    groups: torch.Tensor | None,  # [writes] with MULTI_GROUP
    MULTI_GROUP: bool = False,
    **launch: Any,
) -> None:
    """Write runs of values into rows of a table, or of one table a KV cache group."""
    values = contents.numpy()
    begin = 0
    writes = zip(rows.tolist(), starts.tolist(), cu_lens.tolist(), strict=True)
    for write, (row, start, end) in enumerate(writes):
        if MULTI_GROUP:
            assert groups is not None
            group = int(groups[write])
            target = table_at(int(output[group]), int(output_stride[group]))[row]
        elif output.ndim == 1:
            target = output.numpy()[row:]
        else:
            target = output.numpy()[row]
        target[start : start + end - begin] = values[begin:end]
        begin = end


def gather_block_tables(
    rows: torch.Tensor,  # [requests]
    sources: torch.Tensor,  # [groups] uint64, addresses of tables by request row
    targets: torch.Tensor,  # [groups] uint64, addresses of tables by place in the batch
    strides: torch.Tensor,  # [groups] columns of these tables
    num_blocks: torch.Tensor,  # [groups, request rows]
    num_blocks_stride: int,
    num_requests: int,
    num_computed: torch.Tensor
    | None = None,  # [request rows]; from vLLM 0.33 on, as what follows
    window_reach: torch.Tensor
    | None = None,  # [groups] tokens that a sliding window reads, or 0
    block_sizes: torch.Tensor | None = None,  # [groups]
    MASK_SLIDING_WINDOW: bool = False,
    **launch: Any,
) -> None:
    """Copy the block IDs of a batch's requests. Behind a sliding window they become 0,
    the null block.

    Rows of padding keep what they held: only whole-model CUDA graphs read them.
    """
    rows_np = rows.numpy()
    counts = num_blocks.numpy()[:, rows_np]
    for group, (source, target, stride) in enumerate(
        zip(sources.tolist(), targets.tolist(), strides.tolist(), strict=True)
    ):
        ends = counts[group]
        width = int(ends.max(initial=0))
        block_ids = table_at(source, stride)[rows_np, :width]
        columns = np.arange(width)
        if MASK_SLIDING_WINDOW:
            assert (
                num_computed is not None
                and window_reach is not None
                and block_sizes is not None
            )
            reach = int(window_reach[group])
            if reach > 0:
                unread = np.maximum(num_computed.numpy()[rows_np] - reach, 0)
                num_null = unread // int(block_sizes[group])
                block_ids[columns < num_null[:, None]] = 0
        held = columns < ends[:, None]
        np.copyto(
            table_at(target, stride)[:num_requests, :width], block_ids, where=held
        )


def compute_slot_mappings(
    max_num_tokens: int,
    rows: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    positions: torch.Tensor,  # [tokens]
    tables: torch.Tensor,  # [groups] uint64, addresses of tables by request row
    strides: torch.Tensor,  # [groups] columns of these tables
    block_sizes: torch.Tensor,  # [groups]
    enabled: torch.Tensor,  # [groups] bool
    dcp_sharded: torch.Tensor,  # [groups] bool
    slot_mappings: torch.Tensor,  # [groups, max_num_tokens] int64
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int = 1,
    PAD_ID: int = -1,
    **launch: Any,
) -> None:
    """Where each token's KV goes: its block's ID times the block size, plus its place
    in the block.

    Tokens of rows below 0, groups without slots, and the rest of the buffer get PAD_ID.

    Raises:
        NotImplementedError: with context parallelism, which vLLM's CPU attention does
            not have.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism has no kernels on the CPU")
    rows_np = rows.numpy()
    slots = slot_mappings.numpy()
    starts = query_start_loc.numpy()[: len(rows_np) + 1]
    first = int(starts[0])
    last = int(starts[-1])
    token_positions = positions.numpy()[first:last]
    query_lens = np.diff(starts)
    decoding = bool((query_lens == 1).all())
    token_rows = rows_np if decoding else np.repeat(rows_np, query_lens)
    padding = token_rows < 0
    any_padding = bool(padding.any())
    if any_padding:
        # A table at an address has no last row
        token_rows = np.where(padding, 0, token_rows)
    for group, (table, stride, block_size, is_enabled) in enumerate(
        zip(
            tables.tolist(),
            strides.tolist(),
            block_sizes.tolist(),
            enabled.tolist(),
            strict=True,
        )
    ):
        slots[group, last:max_num_tokens] = PAD_ID
        if not is_enabled:
            slots[group, first:last] = PAD_ID
            continue
        columns, offsets = np.divmod(token_positions, block_size)
        if any_padding:
            columns[padding] = 0
        block_ids = table_at(table, stride)[token_rows, columns].astype(np.int64)
        token_slots = block_ids * block_size + offsets
        if any_padding:
            token_slots[padding] = PAD_ID
        slots[group, first:last] = token_slots


def zero_kv_blocks(
    addresses: torch.Tensor,  # [segments] uint64
    block_strides: torch.Tensor,  # [segments] in int32 words
    page_sizes: torch.Tensor,  # [segments] in int32 words
    block_ids: torch.Tensor,  # [blocks]
    **launch: Any,
) -> None:
    """Zero blocks of KV caches."""
    blocks = block_ids.tolist()
    segments = zip(
        addresses.tolist(), block_strides.tolist(), page_sizes.tolist(), strict=True
    )
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + block * stride * INT32_BYTES, 0, size * INT32_BYTES)
