# SPDX-License-Identifier: Apache-2.0
"""The sampling that drafters share: greedy rows, draws in proportion, and the q(x) told of them."""

from __future__ import annotations

import torch

from vllm_ppd.kernels.sampling import divisor, draw, drawn_from, is_greedy


def test_temperatures() -> None:
    temperature = torch.tensor([0.0, 1e-6, 1e-5, 0.8, 2.0])
    assert is_greedy(temperature).tolist() == [True, True, False, False, False]
    torch.testing.assert_close(divisor(temperature), torch.tensor([[1.0], [1.0], [1e-5], [0.8], [2.0]]))


def test_draws_are_in_proportion_to_the_weights() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0, 6.0], [0.0, 5.0, 5.0, 0.0]])
    drawn = draw(weights.repeat_interleave(40_000, 0), torch.Generator().manual_seed(0)).view(2, -1)
    for row, expected in enumerate(weights / weights.sum(1, keepdim=True)):
        share = torch.bincount(drawn[row], minlength=4) / 40_000
        torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
        assert not share[expected == 0].any()


def test_generators_in_the_same_state_draw_the_same() -> None:
    weights = torch.rand(3, 5, 7)
    first, again = (draw(weights, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, draw(weights, torch.Generator().manual_seed(2)))


def test_q_is_a_unit_vector_where_the_best_was_taken() -> None:
    probs = torch.softmax(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)), -1)
    index = torch.tensor([[4, 0], [1, 2], [3, 3]])
    q = drawn_from(probs, index, torch.tensor([True, False, True]))
    assert torch.equal(q[1], probs[1])
    for row in (0, 2):
        assert q[row].sum(-1).tolist() == [1, 1]
        assert q[row].argmax(-1).tolist() == index[row].tolist()
