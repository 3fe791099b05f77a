# SPDX-License-Identifier: Apache-2.0
"""The mixture of CP's experts at its edges, and the loss that balances them;
test_module.py has its formulas.
"""

import math

import pytest
import torch
from heads_folders import sampling_at

from vllm_ppd.kernels.cp_mixture import (
    balance_loss,
    conditional_log_probs,
    draft_chain,
    mixture,
    posterior,
)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0], [-3e4, 3e4, 2.0, 0.0]])
    logits = logits.expand(
        2,
        3,
        2,
        4,
    )
    weights = torch.tensor([[0.0, -1e4], [-1e4, 0.0]], requires_grad=True)
    factors = logits.log_softmax(-1)
    joint = conditional_log_probs(weights, factors, factors[..., 0])
    loss = balance_loss(weights)
    joint.sum().backward()
    assert weights.grad is not None
    assert all(x.isfinite().all() for x in (joint, loss, weights.grad))
    sampling = sampling_at(torch.tensor([0.0, 1.0]))
    tokens, _ = draft_chain(
        weights,
        logits,
        torch.tensor([1, 1]),
        sampling,
    )
    assert tokens.tolist() == [[1, 1], [1, 1]]  # expert 1 alone explains token 1


def test_tokens_that_all_experts_rule_out() -> None:
    """A vocabulary's masked entries are never drafted, and one that the target samples
    anyway costs no NaN.
    """
    weights = torch.tensor([[-0.5, -0.9327521]])
    ruled_out = torch.full((1, 2), -math.inf)
    torch.testing.assert_close(posterior(weights, ruled_out), weights)
    rows = 20
    logits = torch.zeros(
        rows,
        3,
        2,
        4,
    )
    logits[..., 3] = -math.inf
    torch.manual_seed(0)
    tokens, after = draft_chain(
        weights.expand(rows, 2),
        logits,
        torch.full((rows,), 3),
        sampling_at(torch.ones(rows)),
    )
    assert tokens.min() >= 0 and tokens.max() < 3
    assert after.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    torch.manual_seed(1)
    weights = torch.randn(3, 4).log_softmax(-1).bfloat16()
    factors = torch.randn(3, 4, 5).log_softmax(-1).bfloat16()
    mixed = mixture(weights, factors)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, mixture(weights.float(), factors.float()))


def test_balance_loss_is_that_of_the_hard_counts() -> None:
    torch.manual_seed(3)
    log_weights = torch.randn(
        20,
        4,
        dtype=torch.float64,
    ).log_softmax(-1)
    counts = log_weights.argmax(dim=1).bincount(minlength=4).double()
    expected = (counts / 20 - 1 / 4).square().sum().item()
    assert balance_loss(log_weights).item() == pytest.approx(expected, rel=1e-12)


def test_balance_loss_lowers_the_dominant_expert() -> None:
    torch.manual_seed(4)
    logits = 0.1 * torch.randn(12, 3)
    logits[:, 1] += 2.0
    logits.requires_grad_()
    before = logits.log_softmax(-1)
    balance_loss(before).backward()
    assert logits.grad is not None
    after = (logits - 0.1 * logits.grad).log_softmax(-1)
    assert (after[:, 1] < before[:, 1]).all()
