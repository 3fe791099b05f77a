# SPDX-License-Identifier: Apache-2.0
"""The end of a draft: Triton against torch, to the bit."""

import pytest
import torch

from vllm_ppd.kernels.drafts import finish as reference_finish
from vllm_ppd.kernels.drafts_triton import finish

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAND_IN = 11


def drafts(requests: int, made: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token IDs, some of them INVALID, and request rows, every fourth of padding."""
    generator = torch.Generator().manual_seed(requests + made)
    ids = torch.randint(0, 99, (requests, made), generator=generator)
    ids[torch.rand(requests, made, generator=generator) < 0.2] = -1
    rows = torch.randperm(requests + 2, generator=generator)[:requests]
    rows[3::4] = -1
    return ids.to(DEVICE), rows.to(DEVICE)


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize(("requests", "made"), [(1, 1), (5, 3), (300, 4)])
def test_finish(requests: int, made: int, with_counts: bool) -> None:
    ids, rows = drafts(requests, made)
    counts = torch.randint(0, made + 2, (requests,), device=DEVICE) if with_counts else None
    most = torch.randint(0, 2, (requests,), device=DEVICE).float() * 4
    written = []
    for call in (reference_finish, finish):
        tokens = torch.full((requests + 2, 4), -7, device=DEVICE)
        counted = torch.tensor([5], device=DEVICE)
        call(ids, counts, rows, most, STAND_IN, tokens, counted)
        written.append((tokens, counted))
    for tensor, expected in zip(written[1], written[0], strict=True):
        assert torch.equal(tensor, expected)
    assert (written[0][0][:requests, :made] >= 0).all()
    if requests > 200:
        assert written[0][1] > 5
