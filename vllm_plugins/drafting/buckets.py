# SPDX-License-Identifier: Apache-2.0
"""The batch sizes at which drafting runs once before it serves, so that nothing is compiled later."""

from __future__ import annotations

from collections.abc import Iterator


def buckets(most: int) -> Iterator[int]:
    """Batch sizes, largest first, which takes the most memory; kernels differ by powers of two."""
    yield most
    size = 1 << (most - 1).bit_length() >> 1
    while size:
        yield size
        size >>= 1
