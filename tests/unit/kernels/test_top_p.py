# SPDX-License-Identifier: Apache-2.0
"""Top-p without a sort of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from vllm_ppd.kernels.sampling import Sampling, truncated
from vllm_ppd.kernels.top_p import BEST, mask_top_p


@pytest.mark.parametrize("vocabulary", [40, 5 * BEST])
def test_top_p_without_a_sort_keeps_what_a_sort_keeps(vocabulary: int) -> None:
    torch.manual_seed(0)
    spread = torch.tensor([0.01, 0.3, 1.0, 3.0, 8.0, 2.0])
    logits = torch.randn(6, vocabulary) * spread[:, None]
    top_p = torch.tensor([0.95, 0.5, 0.9, 0.95, 1e-6, 1.0])
    expected = truncated(logits.softmax(-1), Sampling(torch.ones(6), top_p=top_p))
    actual = mask_top_p(logits.clone(), top_p)
    assert torch.equal(actual.isfinite(), expected > 0)
    torch.testing.assert_close(actual.softmax(-1), expected)
    assert torch.equal(actual[5], logits[5])
