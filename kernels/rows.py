# SPDX-License-Identifier: Apache-2.0
"""Rows of saved states in and out of their stores: hidden states and residuals that share one row number."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def store_rows(
    stores: Sequence[torch.Tensor],  # [store rows, width] each
    index: torch.Tensor,  # [rows] int64, row numbers of the stores, no two alike
    values: Sequence[torch.Tensor],  # [rows, width] each, of the stores' types
) -> None:
    """stores[i][index] = values[i], in place."""
    for store, rows in zip(stores, values, strict=True):
        store.index_copy_(0, index, rows)


def load_rows(
    stores: Sequence[torch.Tensor],  # [store rows, width] each
    index: torch.Tensor,  # [rows] int64, row numbers of the stores
) -> list[torch.Tensor]:
    """Copies of stores[i][index]: [rows, width] each."""
    return [store.index_select(0, index) for store in stores]
