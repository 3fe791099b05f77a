# SPDX-License-Identifier: Apache-2.0
"""Values and columns packed into integers, so that one maximum finds the best value and its lowest column.

The order is torch's: -inf < ... < -0 = 0 < ... < inf < NaN. Only for Triton kernels: importing this imports Triton.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def pack(values: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """float32 values and their int32 columns (0 <= column < 2^31) as int64 keys."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def columns_of(keys: tl.tensor) -> tl.tensor:
    """The columns of keys, int64."""
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def values_of(keys: tl.tensor) -> tl.tensor:
    """The values of keys, float32."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
