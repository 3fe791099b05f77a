# SPDX-License-Identifier: Apache-2.0
"""Writes from the host, block tables, slots, zeroed blocks: our kernels against vLLM's,
to the bit.
"""

import inspect

import pytest
import torch
from both_ways import CPU, Tensors, compare, integers, rows_of, starts_of
from vllm.v1.worker.gpu import block_table, buffer_utils
from vllm.v1.worker.utils import KVBlockZeroer

ROWS = 9
SIZES = {1: [16], 3: [16, 32, 64]}  # block sizes by groups


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("columns", [None, 2050])
def test_staged_writes(columns: int | None, dtype: torch.dtype) -> None:
    def case(generator: torch.Generator) -> Tensors:
        size = ROWS if columns is None else (ROWS, columns)
        tensor = buffer_utils.StagedWriteTensor(size, dtype, CPU)
        if columns is None:
            tensor.stage_write_elem(4, 7)
            tensor.stage_write(5, 0, [1, 2])
        else:
            for row, start, length in (
                (3, 0, 1),
                (3, 5, 1030),
                (0, 2049, 1),
                (8, 1, 2049),
            ):
                tensor.stage_write(
                    row, start, integers(generator, 0, 99, length).tolist()
                )
        tensor.apply_write()
        return {"written": tensor.gpu}

    compare(case, 0, "_apply_write_kernel")


def tables_of(
    generator: torch.Generator, groups: int, **settings: object
) -> block_table.BlockTables:
    """Block tables of all rows, with a few to many blocks each."""
    tables = block_table.BlockTables(
        SIZES[groups], ROWS, 300, [70, 40, 20][:groups], CPU, **settings
    )  # type: ignore[arg-type]
    for row in range(ROWS):
        numbers = [
            int(integers(generator, 1, 1 + t.gpu.shape[1], 1))
            for t in tables.block_tables
        ]
        ids = tuple(integers(generator, 1, 1000, number).tolist() for number in numbers)
        tables.append_block_ids(row, ids, overwrite=True)
    tables.apply_staged_writes()
    for target in tables.input_block_tables:
        target.fill_(-7)
    return tables


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("requests", [0, 1, 5])
def test_block_tables(groups: int, requests: int) -> None:
    def case(generator: torch.Generator) -> Tensors:
        tables = tables_of(generator, groups)
        rows = rows_of(generator, requests, ROWS)
        if requests:
            tables.gather_block_tables(rows, requests)
        written = {f"table {i}": t.gpu for i, t in enumerate(tables.block_tables)}
        return written | {
            f"gathered {i}": t[:requests]
            for i, t in enumerate(tables.input_block_tables)
        }

    kernels = ["_apply_write_kernel"]
    if requests:
        kernels.append("_gather_block_tables_kernel")
    compare(case, groups, *kernels)


def test_blocks_behind_a_sliding_window() -> None:
    """From vLLM 0.33 on they may belong to another request."""
    if (
        "sliding_window_reach"
        not in inspect.signature(block_table.BlockTables).parameters
    ):
        pytest.skip("this vLLM keeps them")

    def case(generator: torch.Generator) -> Tensors:
        tables = tables_of(generator, 3, sliding_window_reach=[0, 100, 64])
        rows = rows_of(generator, 6, ROWS)
        tables.gather_block_tables(
            rows, 6, num_computed_tokens=integers(generator, 0, 900, ROWS)
        )
        return {f"gathered {i}": t[:6] for i, t in enumerate(tables.input_block_tables)}

    compare(case, 0, "_gather_block_tables_kernel")


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", ["decoding", "mixed", "padded", "uneven"])
def test_slot_mappings(groups: int, kind: str) -> None:
    lengths = {
        "decoding": [1] * 6,
        "mixed": [1, 40, 4, 1, 100],
        "padded": [1, 3, 1, 2],
        "uneven": [2, 0, 1],
    }[kind]

    def case(generator: torch.Generator) -> Tensors:
        tables = tables_of(
            generator, groups, slot_mapping_enabled=[True, False, True][:groups]
        )
        tables.slot_mappings.fill_(5)
        rows = rows_of(generator, len(lengths), ROWS)
        if kind == "padded":
            rows[1] = rows[3] = -1
        starts = starts_of(torch.tensor(lengths), padding=2)
        positions = integers(generator, 0, 300, sum(lengths) + 3, dtype=torch.int64)
        tables.compute_slot_mappings(rows, starts, positions, 300)
        return {"slots": tables.slot_mappings}

    compare(case, groups, "_compute_slot_mappings_kernel")


def test_zeroed_blocks() -> None:
    def case(generator: torch.Generator) -> Tensors:
        caches = [
            torch.ones(7, 1500, dtype=torch.int32),
            torch.ones(7, 100, dtype=torch.int32),
        ]
        zeroer = object.__new__(KVBlockZeroer)
        zeroer.device = CPU
        zeroer._meta = (
            torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64),
            torch.tensor([cache.shape[1] for cache in caches]),
            torch.tensor([1400, 100]),
            2,
            1024,
            2,
        )
        zeroer.zero_block_ids([0, 5, 6])
        return {f"cache {i}": cache for i, cache in enumerate(caches)}

    compare(case, 0, "_zero_kv_blocks_kernel")
