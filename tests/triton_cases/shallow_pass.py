# SPDX-License-Identifier: Apache-2.0
"""The inputs of a pass of one token a request: Triton against torch, to the bit."""

import pytest
import torch

from vllm_ppd.kernels.shallow_pass import PassInputs
from vllm_ppd.kernels.shallow_pass import begin_pass as reference
from vllm_ppd.kernels.shallow_pass_triton import begin_pass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def buffers(requests: int) -> PassInputs:
    return PassInputs(*(torch.full((requests + 2,), -7, dtype=dtype, device=DEVICE) for dtype in (
        torch.int32, torch.int64, torch.int32, torch.int64,
    )))  # fmt: skip


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("requests", [1, 7, 200])
def test_is_the_reference(requests: int, offset: int) -> None:
    """Padding, INVALID drafts and the end of the model's length among them."""
    most = 40
    rows = torch.randperm(requests, device=DEVICE)
    rows[2::5] = -1
    base = torch.randint(most - 6, most, (requests,), device=DEVICE)
    token_ids = torch.randint(-1, 90, (requests,), device=DEVICE)
    expected, inputs = buffers(requests), buffers(requests)
    reference(rows, base, token_ids, offset, most, expected)
    begin_pass(rows, base, token_ids, offset, most, inputs)
    for tensor, other in zip(inputs, expected, strict=True):
        assert torch.equal(tensor, other)
    assert (inputs.writing[:requests][rows < 0] == -1).all() and inputs.positions[:requests].max() < most
    if offset and requests > 100:
        assert ((rows >= 0) & (inputs.writing[:requests] == -1)).any()
