# SPDX-License-Identifier: Apache-2.0
"""Numbers of safetensors files in numpy are torch's, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_ppd.heads.raw_tensors import RawTensor, raw_tensors, rounded

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.fixture
def numbers() -> torch.Tensor:
    """Of every size, ties between two of a narrower dtype included."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-45, 38, 4096)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -0.0, 65504.0, 65520.0, 3.4e38])
    return torch.cat([values, ties, -ties])


def stored(tensor: torch.Tensor, folder: Path) -> RawTensor:
    save_file({"odd": torch.ones(3, dtype=torch.int8), "x": tensor}, folder / "x.safetensors")
    return raw_tensors(folder / "x.safetensors", ["x"])["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_torch(numbers: torch.Tensor, tmp_path: Path, dtype: str) -> None:
    narrow = numbers.to(DTYPES[dtype])
    expected = narrow.float().numpy().view(np.uint32)  # a zero has its sign, too
    raw = stored(narrow.view(-1, 8), tmp_path)
    assert raw.dtype == dtype and raw.bits.shape == (len(numbers) // 8, 8)
    assert np.array_equal(raw.float32().view(np.uint32).flatten(), expected)
    assert np.array_equal(rounded(numbers.numpy(), dtype).view(np.uint32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite_is_told(tmp_path: Path, dtype: str, sign: int) -> None:
    most = torch.finfo(DTYPES[dtype]).max
    numbers = sign * torch.tensor([[0.0, 1.0, most], [-0.0, -1.0, -most]])
    assert stored(numbers.to(DTYPES[dtype]), tmp_path).is_finite
    assert stored(numbers[:, :0].to(DTYPES[dtype]), tmp_path).is_finite
    for value in (float("inf"), float("nan")):
        numbers[0, 1] = sign * value
        assert not stored(numbers.to(DTYPES[dtype]), tmp_path).is_finite
