# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file, mapped by numpy as raw bits (it has no bfloat16), as torch takes seconds to load."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUMPY = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "I32": np.int32, "I64": np.int64}
INFINITY = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}  # as bits; a NaN's bits are greater


class RawTensor(NamedTuple):
    """The bits of a tensor of one of the dtypes in NUMPY."""

    dtype: str  # as safetensors names it
    bits: np.ndarray  # in the tensor's shape; integers are not converted

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite, that is, has bits (without the sign) of at least infinity's."""
        if not self.bits.size:
            return True
        most, sign = INFINITY[self.dtype], 1 << (8 * self.bits.itemsize - 1)
        # Signed integers order negative numbers before positive ones; unsigned integers order them after.
        signed = self.bits.view(np.dtype(f"i{self.bits.itemsize}"))
        return int(signed.max()) < most and int(self.bits.max()) < most + sign

    def float32(self) -> np.ndarray:
        """The exact numbers."""
        if self.dtype == "BF16":
            return (self.bits.astype(np.uint32) << 16).view(np.float32)
        return self.bits.view(np.float16).astype(np.float32) if self.dtype == "F16" else self.bits.view(np.float32)


def raw_tensors(path: Path, names: Iterable[str]) -> dict[str, RawTensor]:
    """Some tensors of a file that safetensors has opened, and thereby checked, before.

    Raises:
        OSError: if it cannot be read.
        KeyError: if there is no such tensor, or it has another dtype.
    """
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int(mapped[:8].view(np.uint64)[0])
    header, tensors = json.loads(mapped[8:start].tobytes()), {}
    for name in names:
        dtype, shape, (begin, end) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
        assert end - begin == math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
        tensors[name] = RawTensor(dtype, mapped[start + begin : start + end].view(NUMPY[dtype]).reshape(shape))
    return tensors


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers rounded to the nearest of a dtype, ties to even, as float32."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values
