# SPDX-License-Identifier: Apache-2.0
"""Distributions cut to top-k and top-p, against vLLM's own."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_ppd.kernels.sampling import Sampling, distribution

ROWS, VOCAB = 40, 97


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
def test_distribution_is_vllms(with_k: bool, with_p: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    temperature = 0.2 + 2 * torch.rand(ROWS, generator=generator)
    top_k = torch.randint(1, VOCAB + 1, (ROWS,), generator=generator) if with_k else None
    top_p = 1 - torch.rand(ROWS, generator=generator) if with_p else None
    if top_p is not None:
        top_p[:3] = torch.tensor([1.0, 1e-6, 0.5])
    expected = apply_top_k_top_p_pytorch(logits / temperature[:, None], top_k, top_p).softmax(-1)
    actual = distribution(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(actual, expected)
    assert ((actual > 0) == (expected > 0)).all()
