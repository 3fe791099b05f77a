# SPDX-License-Identifier: Apache-2.0
"""Verification by the tokens drawn: Triton against torch, and both against a plain loop."""

import pytest
import torch

from vllm_ppd.kernels.acceptance import accept_drawn as reference
from vllm_ppd.kernels.acceptance_triton import accept_drawn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_accepted_as_long_as_they_are_drawn(seed: int) -> None:
    """For ragged numbers of drafts, and drafts that must not be used."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, WIDTH + 1, (5,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    drawn, drafts = torch.randint(0, 2, (2, int(rows.sum())), generator=generator)
    drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.1, -1, drafts).int()
    arguments = drawn.to(DEVICE), drafts.to(DEVICE), starts.int().to(DEVICE), WIDTH
    for tokens, counts in (reference(*arguments), accept_drawn(*arguments)):
        assert tokens.dtype == drafts.dtype and counts.dtype == torch.int32
        for request, start in enumerate(starts[:-1].tolist()):
            number = 1
            while number < rows[request] and drawn[start + number - 1] == drafts[start + number]:
                number += 1
            assert counts[request] == number
            assert tokens[request, :number].tolist() == drawn[start : start + number].tolist()
