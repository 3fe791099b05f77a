# SPDX-License-Identifier: Apache-2.0
"""Kernels of buffer_utils.py, block_table.py and worker/utils.py: writes, block tables,
slots; views of memory, and the arithmetic of ragged batches.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from numpy import ndarray

INT32_BYTES = 4
# Of a table behind a pointer; only rows that exist are touched
MAX_ROWS = 1 << 16


def apply_write(
    # [rows] or [rows, columns]; with MULTI_GROUP [groups], addresses of tables
    output: ndarray,
    output_stride: Any,  # int; with MULTI_GROUP [groups], the tables' columns
    write_indices: ndarray,  # [writes] rows
    write_starts: ndarray,  # [writes] first column
    write_contents: ndarray,  # [values] of all writes
    write_cu_lens: ndarray,  # [writes] where each write's values end
    write_group_ids: Any,  # [writes] with MULTI_GROUP, else None
    MULTI_GROUP: bool,
) -> None:
    """Write runs of values into rows of a table, or of one table a KV cache group."""
    begin = 0
    for write, end in enumerate(write_cu_lens):
        row = write_indices[write]
        start = write_starts[write]
        if MULTI_GROUP:
            group = write_group_ids[write]
            target = table_at(output[group], output_stride[group])[row]
        elif output.ndim == 1:
            target = output[row:]
        else:
            target = output[row]
        target[start : start + end - begin] = write_contents[begin:end]
        begin = end


def gather_block_tables(
    batch_idx_to_req_idx: ndarray,  # [requests] request rows
    src_block_table_ptrs: ndarray,  # [groups] addresses of tables by request row
    dst_block_table_ptrs: ndarray,  # [groups] addresses of tables by place in the batch
    block_table_strides: ndarray,  # [groups] columns of these tables
    num_blocks: ndarray,  # [groups, request rows]
    num_reqs: int,
    # From vLLM 0.33 on:
    num_computed_tokens: Any = None,  # [request rows]
    sliding_window_reach: Any = None,  # [groups] tokens that a window reads, or 0
    block_sizes: Any = None,  # [groups]
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the block IDs of a batch's requests. Behind a sliding window they become 0,
    the null block.

    Rows of padding keep what they held: only whole-model CUDA graphs read them.
    """
    rows = batch_idx_to_req_idx
    for group, stride in enumerate(block_table_strides.tolist()):
        ends = num_blocks[group, rows]
        width = int(ends.max(initial=0))
        columns = np.arange(width)
        block_ids = table_at(src_block_table_ptrs[group], stride)[rows, :width]
        if MASK_SLIDING_WINDOW and sliding_window_reach[group] > 0:
            first_read = num_computed_tokens[rows] - sliding_window_reach[group]
            num_null = np.maximum(first_read, 0) // block_sizes[group]
            block_ids[columns < num_null[:, None]] = 0
        target = table_at(dst_block_table_ptrs[group], stride)[:num_reqs, :width]
        np.copyto(target, block_ids, where=columns < ends[:, None])


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: ndarray,  # [requests] request rows
    query_start_loc: ndarray,  # [requests + 1 or more]
    pos: ndarray,  # [tokens]
    block_table_ptrs: ndarray,  # [groups] addresses of tables by request row
    block_table_strides: ndarray,  # [groups] columns of these tables
    block_sizes: ndarray,  # [groups]
    slot_mapping_enabled: ndarray,  # [groups] bool
    slot_mappings: ndarray,  # [groups, max_num_tokens] int64
    CP_SIZE: int,
    PAD_ID: int,
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
    query_lens = lengths_between(query_start_loc, idx_mapping)
    token_rows = idx_mapping.repeat(query_lens)
    targets: Any = slice(len(token_rows))
    if idx_mapping.min(initial=0) < 0:
        targets = np.flatnonzero(token_rows >= 0)
        token_rows = token_rows[targets]
    positions = pos[targets]
    slot_mappings[:, :max_num_tokens] = PAD_ID
    for group, block_size in enumerate(block_sizes.tolist()):
        if not slot_mapping_enabled[group]:
            continue
        columns, offsets = np.divmod(positions, block_size)
        table = table_at(block_table_ptrs[group], block_table_strides[group])
        block_ids = table[token_rows, columns]
        slots = np.multiply(block_ids, block_size, dtype=np.int64)
        slot_mappings[group, targets] = slots + offsets


def zero_kv_blocks(
    seg_addrs: ndarray,  # [segments] addresses
    seg_block_strides: ndarray,  # [segments] in int32 words
    seg_page_sizes: ndarray,  # [segments] in int32 words
    block_ids: ndarray,  # [blocks]
) -> None:
    """Zero blocks of KV caches."""
    for segment, address in enumerate(seg_addrs.tolist()):
        stride = int(seg_block_strides[segment]) * INT32_BYTES
        size = int(seg_page_sizes[segment]) * INT32_BYTES
        for block in block_ids.tolist():
            ctypes.memset(address + block * stride, 0, size)


@functools.lru_cache(maxsize=256)
def table_at(pointer: int, num_columns: int) -> ndarray:
    """The int32 table [MAX_ROWS, num_columns] that begins at an address."""
    size = MAX_ROWS * int(num_columns)
    memory: Any = (ctypes.c_int32 * size).from_address(int(pointer))
    return np.frombuffer(memory, dtype=np.int32).reshape(MAX_ROWS, -1)


def lengths_between(starts: ndarray, items: ndarray) -> ndarray:
    """The lengths of the items, given where they begin and the last ends: [items]."""
    count = len(items)
    return starts[1 : count + 1] - starts[:count]


def counted_from(firsts: ndarray, starts: ndarray, lengths: ndarray) -> ndarray:
    """The numbers first, first + 1, ... of each of several spans: [sum of lengths].

    Args:
        firsts: [spans].
        starts: [spans or more] the items before each span, so its sum of lengths.
        lengths: [spans].
    """
    shifts = np.repeat(firsts - starts[: len(firsts)], lengths)
    return shifts + np.arange(len(shifts))


def spans(lengths: ndarray) -> tuple[ndarray, ndarray]:
    """The items of consecutive spans.

    Args:
        lengths: [spans].

    Returns:
        (the span of each item, its index within that span), both [sum of lengths].
    """
    owners = np.arange(len(lengths)).repeat(lengths)
    first_items = lengths.cumsum() - lengths
    return owners, np.arange(len(owners)) - first_items[owners]


def unpacked(words: ndarray, count: int) -> ndarray:
    """The first bits of packed int32 words [words], from the lowest on: [count] bool."""
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return bits.view(bool)
