# SPDX-License-Identifier: Apache-2.0
"""Staging a step: Triton against torch, to the bit."""

import pytest
import torch
from interpreter import DEVICE

from vllm_ppd.kernels.staging import Staged, StepEnd
from vllm_ppd.kernels.staging import stage as reference
from vllm_ppd.kernels.staging_triton import stage

torch.set_default_device(DEVICE)
ROWS = 9
PLACES = 8


def buffers(width: int, dtype: torch.dtype) -> Staged:
    return Staged(
        *torch.full((4, PLACES), -7),
        torch.full((PLACES, width), -7, dtype=dtype),
        torch.full((6, PLACES), -7.0),
        torch.full((PLACES,), -7),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("requests", "padded", "width"),
    [
        (1, 1, 64),
        (3, 4, 1030),
        (8, 8, 2048),
    ],
)
def test_is_the_reference(
    requests: int, padded: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(requests)
    lengths = torch.randint(1, 6, (requests,))
    # Longer than the batch, as vLLM's buffers are
    starts = torch.zeros(requests + 3, dtype=torch.int32)
    starts[1 : requests + 1] = lengths.cumsum(0)
    tokens = int(lengths.sum())
    end = StepEnd(
        rows=torch.randperm(ROWS)[:requests].int(),
        query_starts=starts,
        num_sampled=(
            torch.arange(requests) != 1
        ).int(),  # the second: in its prompt
        num_rejected=(torch.rand(requests) * lengths).int(),
        last_sampled=torch.randint(0, 1000, (ROWS, 1)),
        positions=torch.randint(0, 90, (tokens,)),
        hidden=torch.randn(tokens, width).to(dtype),
        seeds=torch.randint(-(1 << 62), 1 << 62, (ROWS,)),
    )
    settings = torch.randn(ROWS + 1, 6)
    settings[2, 5] = torch.nan
    expected = buffers(width, dtype)
    staged = buffers(width, dtype)
    reference(
        end,
        settings,
        expected,
        padded,
    )
    stage(
        end,
        settings,
        staged,
        padded,
    )
    torch.testing.assert_close(
        tuple(staged), tuple(expected), rtol=0, atol=0, equal_nan=True
    )
    assert (staged.rows[requests:padded] == -1).all()
    assert requests < 2 or staged.rows[1] == -1
