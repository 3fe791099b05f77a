# SPDX-License-Identifier: Apache-2.0
"""The sampling that drafters share: greedy rows, draws in proportion, top-k and top-p."""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_ppd.kernels.sampling import Sampling, distribution, divisor, draw, is_greedy

ROWS = 40
VOCAB = 97


def test_temperatures() -> None:
    temperature = torch.tensor([0.0, 1e-6, 1e-5, 0.8, 2.0])
    assert is_greedy(temperature).tolist() == [True, True, False, False, False]
    torch.testing.assert_close(
        divisor(temperature), torch.tensor([[1.0], [1.0], [1e-5], [0.8], [2.0]])
    )


def test_draws_are_in_proportion_to_the_weights() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0, 6.0], [0.0, 5.0, 5.0, 0.0]])
    drawn = draw(
        weights.repeat_interleave(40_000, 0), torch.Generator().manual_seed(0)
    ).view(2, -1)
    for row, expected in enumerate(weights / weights.sum(1, keepdim=True)):
        share = torch.bincount(drawn[row], minlength=4) / 40_000
        torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
        assert not share[expected == 0].any()


def test_generators_in_the_same_state_draw_the_same() -> None:
    weights = torch.rand(3, 5, 7)
    first, again = (draw(weights, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, draw(weights, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
def test_distribution_is_vllms(with_k: bool, with_p: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    temperature = 0.2 + 2 * torch.rand(ROWS, generator=generator)
    top_k = (
        torch.randint(1, VOCAB + 1, (ROWS,), generator=generator) if with_k else None
    )
    top_p = 1 - torch.rand(ROWS, generator=generator) if with_p else None
    if top_p is not None:
        top_p[:3] = torch.tensor([1.0, 1e-6, 0.5])
    expected = apply_top_k_top_p_pytorch(
        logits / temperature[:, None], top_k, top_p
    ).softmax(-1)
    actual = distribution(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(actual, expected)
    assert ((actual > 0) == (expected > 0)).all()
