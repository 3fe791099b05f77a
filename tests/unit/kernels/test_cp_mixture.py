# SPDX-License-Identifier: Apache-2.0
"""The mixture of CP's experts at its edges, and the loss that balances them;
test_module.py has its formulas.
"""

import math

import pytest
import torch

from vllm_ppd.kernels.cp_mixture import (
    balance_loss,
    chain_log_likelihood,
    draft_chain,
    mixture,
    posterior,
)
from vllm_ppd.kernels.sampling import Sampling

F64 = torch.float64


def seeded(*shape: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
        * scale
    )


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0], [-3e4, 3e4, 2.0, 0.0]]).expand(
        2, 3, 2, 4
    )
    factors = logits.log_softmax(-1)
    weights = torch.tensor([[0.0, -1e4], [-1e4, 0.0]], requires_grad=True)
    seen = factors[..., 1]
    joint = chain_log_likelihood(weights, seen)
    results = [
        joint,
        posterior(weights, seen[:, 0]),
        mixture(weights, factors[:, 0]),
        balance_loss(weights),
    ]
    joint.sum().backward()
    assert weights.grad is not None
    assert all(tensor.isfinite().all() for tensor in [*results, weights.grad])
    tokens, _ = draft_chain(
        weights, logits, torch.tensor([1, 1]), Sampling(torch.tensor([0.0, 1.0]))
    )
    assert tokens.tolist() == [[1, 1], [1, 1]]  # expert 1 alone explains token 1


def test_tokens_that_all_experts_rule_out() -> None:
    """A vocabulary's masked entries are never drafted, and one that the target samples
    anyway costs no NaN.
    """
    weights = torch.tensor([[-0.5, -0.9327521]])
    torch.testing.assert_close(
        posterior(weights, torch.full((1, 2), -math.inf)), weights
    )
    logits = torch.zeros(1, 3, 2, 4)
    logits[..., 3] = -math.inf
    for seed in range(20):
        torch.manual_seed(seed)
        tokens, after = draft_chain(
            weights, logits, torch.tensor([3]), Sampling(torch.ones(1))
        )
        assert tokens.min() >= 0 and tokens.max() < 3
        assert after.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    weights, factors = (
        seeded(3, *shape, seed=1).log_softmax(-1).bfloat16() for shape in ((4,), (4, 5))
    )
    mixed = mixture(weights, factors)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, mixture(weights.float(), factors.float()))


def test_low_temperatures_draw_the_best() -> None:
    """At 0.01 a probability of 0.4 to the power of 100 is 0 in float32; the peak is
    drawn all the same.
    """
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 2, 200)
    weights = torch.zeros(5, 2).log_softmax(-1)
    first = torch.tensor([3, 9, 0, 7, 1])
    best, _ = draft_chain(weights, logits, first)
    for temperature in (0.01, 0.001):
        tokens, _ = draft_chain(
            weights, logits, first, Sampling(torch.full((5,), temperature))
        )
        assert (tokens == best).float().mean() > 0.7


def test_balance_loss_is_that_of_the_hard_counts() -> None:
    log_weights = seeded(20, 4, seed=3).log_softmax(-1)
    for valid in (None, torch.arange(20) % 3 > 0):
        rows = [row for row in range(20) if valid is None or valid[row]]
        counts = [0] * 4
        for row in rows:
            counts[max(range(4), key=lambda a: log_weights[row, a].item())] += 1
        expected = sum((count / len(rows) - 1 / 4) ** 2 for count in counts)
        assert balance_loss(log_weights, valid).item() == pytest.approx(
            expected, rel=1e-12
        )


def test_balance_loss_lowers_the_dominant_expert_and_vanishes_where_there_is_none() -> (
    None
):
    logits = seeded(12, 3, seed=4, scale=0.1)
    logits[:, 1] += 2.0
    logits.requires_grad_()
    before = logits.log_softmax(-1)
    balance_loss(before).backward()
    assert logits.grad is not None
    assert ((logits - 0.1 * logits.grad).log_softmax(-1)[:, 1] < before[:, 1]).all()
    balanced = (
        (torch.eye(3, dtype=F64).repeat(4, 1) * 2).log_softmax(-1).requires_grad_()
    )
    assert balance_loss(balanced).item() == pytest.approx(0.0, abs=1e-24)
    assert balance_loss(torch.zeros(5, 1)).item() == 0.0
    nobody = balance_loss(balanced, torch.zeros(12, dtype=torch.bool))
    nobody.backward()
    assert nobody.item() == 0.0
