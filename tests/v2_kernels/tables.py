# SPDX-License-Identifier: Apache-2.0
"""Writes from the host, block tables, slots, zeroed blocks: our kernels against vLLM's,
to the bit.
"""

import inspect

import pytest
import torch
from both_ways import CPU, ROWS, both_ways, ints, rows_of, starts_of
from vllm.v1.worker.gpu import block_table, buffer_utils
from vllm.v1.worker.utils import KVBlockZeroer

SIZES = [16, 32, 64]  # block sizes of the groups


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [ROWS, (ROWS, 2050)])
@both_ways("_apply_write_kernel")
def test_staged_writes(shape, dtype):
    tensor = buffer_utils.StagedWriteTensor(shape, dtype, CPU)
    if shape == ROWS:
        tensor.stage_write_elem(4, 7)
        tensor.stage_write(5, 0, [1, 2])
    else:
        for row, start, length in (
            (3, 0, 1),
            (3, 5, 1030),
            (0, 2049, 1),
            (8, 1, 2049),
        ):
            tensor.stage_write(row, start, ints(0, 99, length).tolist())
    tensor.apply_write()
    return tensor.gpu


def tables_of(groups, **settings):
    """Block tables of all rows, with a few to many blocks each."""
    tables = block_table.BlockTables(
        SIZES[:groups], ROWS, 300, [70, 40, 20][:groups], CPU, **settings
    )
    for row in range(ROWS):
        ids = []
        for group in tables.block_tables:
            number = int(ints(1, 1 + group.gpu.shape[1], 1))
            ids.append(ints(1, 1000, number).tolist())
        tables.append_block_ids(row, tuple(ids), overwrite=True)
    tables.apply_staged_writes()
    for target in tables.input_block_tables:
        target.fill_(-7)
    return tables


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("requests", [1, 5])
@both_ways("_apply_write_kernel", "_gather_block_tables_kernel")
def test_block_tables(groups, requests):
    tables = tables_of(groups)
    tables.gather_block_tables(rows_of(requests), requests)
    gathered = [target[:requests] for target in tables.input_block_tables]
    return [group.gpu for group in tables.block_tables], gathered


@pytest.mark.skipif(
    "sliding_window_reach"
    not in inspect.signature(block_table.BlockTables).parameters,
    reason="vLLM keeps them before 0.33",
)
@both_ways("_gather_block_tables_kernel")
def test_blocks_behind_a_sliding_window():
    """From vLLM 0.33 on they may belong to another request."""
    tables = tables_of(3, sliding_window_reach=[0, 100, 64])
    computed = ints(0, 900, ROWS)
    tables.gather_block_tables(rows_of(6), 6, num_computed_tokens=computed)
    return [target[:6] for target in tables.input_block_tables]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "padding"),
    [
        ([1] * 6, []),
        ([1, 40, 4, 1, 100], []),
        ([1, 3, 1, 2], [1, 3]),
        ([2, 0, 1], []),
    ],
)
@both_ways("_compute_slot_mappings_kernel")
def test_slot_mappings(groups, lengths, padding):
    tables = tables_of(groups, slot_mapping_enabled=[True, False, True][:groups])
    tables.slot_mappings.fill_(5)
    rows = rows_of(len(lengths))
    rows[padding] = -1
    positions = torch.randint(0, 300, (sum(lengths) + 3,))
    tables.compute_slot_mappings(
        rows,
        starts_of(lengths, 2),
        positions,
        300,
    )
    return tables.slot_mappings


@both_ways("_zero_kv_blocks_kernel")
def test_zeroed_blocks():
    caches = [torch.ones(7, size, dtype=torch.int32) for size in (1500, 100)]
    zeroer = object.__new__(KVBlockZeroer)
    zeroer.device = CPU
    zeroer._meta = (
        torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64),
        torch.tensor([1500, 100]),
        torch.tensor([1400, 100]),
        2,
        1024,
        2,
    )
    zeroer.zero_block_ids([0, 5, 6])
    return caches
