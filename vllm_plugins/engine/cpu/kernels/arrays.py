# SPDX-License-Identifier: Apache-2.0
"""Views of memory, and the arithmetic of ragged batches."""

import ctypes
from functools import lru_cache

import numpy as np
import torch

MAX_ROWS = 1 << 16  # of a table behind a pointer; only rows that exist are touched


@lru_cache(maxsize=256)
def table_at(pointer: int, num_columns: int) -> np.ndarray:
    """The int32 table [MAX_ROWS, num_columns] that begins at an address."""
    memory = (ctypes.c_int32 * (MAX_ROWS * num_columns)).from_address(pointer)
    return np.ctypeslib.as_array(memory).reshape(MAX_ROWS, num_columns)


def spans(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The items of consecutive spans.

    Args:
        lengths: [spans].

    Returns:
        (the span of each item, its index within that span), both [sum of lengths].
    """
    owners = np.repeat(np.arange(len(lengths)), lengths)
    first_items = np.cumsum(lengths) - lengths
    return owners, np.arange(len(owners)) - first_items[owners]


def unpacked(bits: torch.Tensor, count: int) -> np.ndarray:
    """The first bits of packed int32 words [words], from the lowest on: [count] bool."""
    words = bits.numpy().view(np.uint8)
    return np.unpackbits(words, count=count, bitorder="little").view(bool)


def as_float32(logits: torch.Tensor) -> np.ndarray:
    """Logits as numpy: a view if they are float32, else a copy."""
    return logits.float().numpy()
