# SPDX-License-Identifier: Apache-2.0
"""Saved rows in and out of their stores in one launch for hidden states and residuals together.

torch needs one launch a store; with a few rows the launch is what a copy costs. Numbers are moved, never computed with,
so NaN and every other bit pattern arrives as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import rows

BLOCK = 1024  # numbers a program


@triton.jit
def _copy(
    store_a: tl.tensor,
    store_b: tl.tensor,
    values_a: tl.tensor,
    values_b: tl.tensor,
    index: tl.tensor,
    width: tl.tensor,
    step_store_a: tl.tensor,
    step_store_b: tl.tensor,
    step_values_a: tl.tensor,
    step_values_b: tl.tensor,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = tl.program_id(2) == 0
    if first:
        saved, given = store_a + place * step_store_a, values_a + row * step_values_a
        if STORE:
            tl.store(saved + columns, tl.load(given + columns, mask=inside), mask=inside)
        else:
            tl.store(given + columns, tl.load(saved + columns, mask=inside), mask=inside)
    else:
        saved, given = store_b + place * step_store_b, values_b + row * step_values_b
        if STORE:
            tl.store(saved + columns, tl.load(given + columns, mask=inside), mask=inside)
        else:
            tl.store(given + columns, tl.load(saved + columns, mask=inside), mask=inside)


def _fits(stores: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether one launch serves them: one or two stores of one width, numbers of a row side by side."""
    tensors = [*stores, *values]
    alike = len({(tensor.dtype, tensor.shape[1]) for tensor in tensors}) == 1
    return len(stores) in (1, 2) and alike and all(tensor.stride(1) == 1 for tensor in tensors)


def _launch(stores: Sequence[torch.Tensor], index: torch.Tensor, values: Sequence[torch.Tensor], store: bool) -> None:
    width = stores[0].shape[1]
    if len(index) == 0 or width == 0:
        return
    steps = [tensor.stride(0) for tensor in (stores[0], stores[-1], values[0], values[-1])]
    grid = (len(index), triton.cdiv(width, BLOCK), len(stores))
    _copy[grid](stores[0], stores[-1], values[0], values[-1], index, width, *steps, STORE=store, BLOCK=BLOCK)


def store_rows(stores: Sequence[torch.Tensor], index: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """As the reference; other than one or two stores of one type and width go through it."""
    if len(stores) == len(values) and _fits(stores, values):
        _launch(stores, index, values, store=True)
    else:
        rows.store_rows(stores, index, values)


def load_rows(stores: Sequence[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
    """As the reference; other than one or two stores of one type and width go through it."""
    if not _fits(stores, stores):
        return rows.load_rows(stores, index)
    values = [store.new_empty(len(index), store.shape[1]) for store in stores]
    _launch(stores, index, values, store=False)
    return values
