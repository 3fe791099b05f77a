# SPDX-License-Identifier: Apache-2.0
"""Losses over a large vocabulary, a chunk of rows at a time."""

import pytest
import torch
from torch.nn import functional

from vllm_ppd.kernels import unembedding_loss
from vllm_ppd.kernels.unembedding_loss import kl_to_teacher, token_log_probs


def assert_same(
    ours: torch.Tensor,
    plain: torch.Tensor,
    actual: torch.Tensor,
    direct: torch.Tensor,
) -> None:
    """Losses, and the gradients of a weighted sum of them in the states."""
    torch.testing.assert_close(actual, direct)
    weights = torch.randn_like(direct)
    (actual * weights).sum().backward()
    (direct * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize(
    ("bias", "cap"), [(False, None), (True, None), (True, 2.0)]
)
def test_losses_equal_plain_autograd(
    monkeypatch: pytest.MonkeyPatch, bias: bool, cap: float | None
) -> None:
    """The gradients that are formed in the forward pass are autograd's, for any size of chunk."""
    torch.manual_seed(0)
    monkeypatch.setitem(unembedding_loss.CHUNK_ELEMENTS, "cpu", 3 * 50)
    monkeypatch.setattr(unembedding_loss, "LEAST_ROWS", 1)
    matrix = torch.randn(50, 8)
    shift = torch.randn(50) if bias else None

    def log_probs(states: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(states, matrix, shift)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return functional.log_softmax(logits, -1)

    def twice(*shape: int) -> list[torch.Tensor]:
        states = torch.randn(*shape)
        return [states.clone().requires_grad_() for _ in range(2)]

    for tokens in (torch.randint(50, (10,)), torch.randint(50, (10, 4))):
        ours, plain = twice(10, 8)
        direct = (
            log_probs(plain).gather(1, tokens.view(10, -1)).view(tokens.shape)
        )
        assert_same(
            ours,
            plain,
            token_log_probs(ours, tokens, matrix, shift, cap),
            direct,
        )

    (ours, plain), teacher = twice(3, 10, 8), torch.randn(10, 8)
    log_p = log_probs(teacher)
    log_q = log_probs(plain)
    actual, best = kl_to_teacher(
        ours,
        teacher,
        matrix,
        shift,
        cap=cap,
    )
    assert torch.equal(best, log_q.argmax(-1))
    assert_same(
        ours,
        plain,
        actual,
        (log_p.exp() * (log_p - log_q)).sum(-1),
    )


def test_gradients_near_the_optimum_in_bfloat16() -> None:
    """Two sums that are rounded apart differ from float32's by 3.7 % here. A row may
    have a token twice.
    """
    torch.manual_seed(0)
    matrix = (0.1 * torch.randn(20, 64)).bfloat16()
    states = torch.randn(30, 64).bfloat16()
    log_p = (states.float() @ matrix.float().T).log_softmax(-1)
    best = log_p.topk(16)
    tokens = torch.cat([best.indices[:, :1], best.indices], dim=1)
    noise = 1 + 0.01 * torch.randn(30, 17)
    weights = torch.cat([torch.zeros(30, 1), best.values.exp()], dim=1) * noise
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        read = states.to(dtype).requires_grad_()
        log_q = token_log_probs(read, tokens, matrix.to(dtype))
        (weights * log_q).sum().backward()
        assert read.grad is not None
        gradients.append(read.grad.float())
    expected, actual = gradients
    assert (actual - expected).norm() < 0.025 * expected.norm()
