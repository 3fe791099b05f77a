# SPDX-License-Identifier: Apache-2.0
"""Saved rows: Triton against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from vllm_ppd.kernels import rows, rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@TYPES
@pytest.mark.parametrize("width", [1, 64, 1025])
@pytest.mark.parametrize("stores", [1, 2, 3])
def test_rows_return_as_they_went(dtype: torch.dtype, width: int, stores: int) -> None:
    torch.manual_seed(width)
    kept = [torch.randn(12, width, device=DEVICE).to(dtype) for _ in range(stores)]
    expected = [store.clone() for store in kept]
    index = torch.tensor([11, 0, 7], device=DEVICE)
    # Every second row of a wider tensor: strides are not widths.
    values = [torch.randn(6, width + 3, device=DEVICE).to(dtype)[::2, :width] for _ in range(stores)]
    values[0][1, 0] = float("nan")
    rows_triton.store_rows(kept, index, values)
    rows.store_rows(expected, index, values)
    found = rows_triton.load_rows(kept, index.flip(0))
    for store, reference, row, value in zip(kept, expected, found, values, strict=True):
        torch.testing.assert_close(store, reference, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(row, value.flip(0), rtol=0, atol=0, equal_nan=True)


def test_no_rows() -> None:
    store, none = torch.ones(3, 4, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    rows_triton.store_rows([store], none, [store[:0]])
    assert rows_triton.load_rows([store], none)[0].shape == (0, 4)


def test_mismatched_stores_are_refused_as_by_the_reference() -> None:
    store = torch.ones(3, 4, device=DEVICE)
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="shorter"):
        rows_triton.store_rows([store, store.clone()], index, [store[:1].clone()])
