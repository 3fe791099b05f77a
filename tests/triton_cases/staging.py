# SPDX-License-Identifier: Apache-2.0
"""Staging a step: Triton against torch, to the bit."""

import pytest
import torch

from vllm_ppd.kernels.staging import Staged, StepEnd
from vllm_ppd.kernels.staging import stage as reference
from vllm_ppd.kernels.staging_triton import stage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 9
PLACES = 8


def buffers(width: int, dtype: torch.dtype) -> Staged:
    integers = (torch.full((PLACES,), -7, device=DEVICE) for _ in range(4))
    hidden = torch.full((PLACES, width), -7, dtype=dtype, device=DEVICE)
    return Staged(
        *integers,
        hidden,
        torch.full((6, PLACES), -7.0, device=DEVICE),
        torch.full((PLACES,), -7, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("requests", "padded", "width"), [(1, 1, 64), (3, 4, 1030), (8, 8, 2048)]
)
def test_is_the_reference(
    requests: int, padded: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(requests)
    lengths = torch.randint(1, 6, (requests,), generator=generator)
    # Longer than the batch, as vLLM's buffers are
    starts = torch.zeros(requests + 3, dtype=torch.int32)
    starts[1 : requests + 1] = lengths.cumsum(0)
    tokens = int(lengths.sum())
    end = StepEnd(
        rows=torch.randperm(ROWS, generator=generator)[:requests].int().to(DEVICE),
        query_starts=starts.to(DEVICE),
        num_sampled=(torch.arange(requests) != 1)
        .int()
        .to(DEVICE),  # the second is within its prompt
        num_rejected=(torch.rand(requests, generator=generator) * lengths)
        .int()
        .to(DEVICE),
        last_sampled=torch.randint(0, 1000, (ROWS, 1), generator=generator).to(DEVICE),
        positions=torch.randint(0, 90, (tokens,), generator=generator).to(DEVICE),
        hidden=torch.randn(tokens, width, generator=generator).to(DEVICE, dtype),
        seeds=torch.randint(-(1 << 62), 1 << 62, (ROWS,), generator=generator).to(
            DEVICE
        ),
    )
    settings = torch.randn(ROWS + 1, 6, generator=generator).to(DEVICE)
    settings[2, 5] = torch.nan
    expected = buffers(width, dtype)
    staged = buffers(width, dtype)
    reference(end, settings, expected, padded)
    stage(end, settings, staged, padded)
    for tensor, other in zip(staged, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0, equal_nan=True)
    assert (staged.rows[requests:padded] == -1).all()
    assert requests < 2 or staged.rows[1] == -1
