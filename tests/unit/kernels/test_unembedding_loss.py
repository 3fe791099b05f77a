# SPDX-License-Identifier: Apache-2.0
"""Losses over a large vocabulary, a chunk of rows at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vllm_ppd.kernels import unembedding_loss
from vllm_ppd.kernels.unembedding_loss import kl_to_teacher, token_log_probs


@pytest.mark.parametrize(("vocabulary", "rows"), [(4096, 128), (49_152, 128), (1024, 512)])
def test_large_vocabularies_are_read_for_many_rows_at_once(vocabulary: int, rows: int) -> None:
    assert unembedding_loss.rows_a_chunk(torch.empty(vocabulary, 1)) == rows


@pytest.mark.parametrize("bias", [False, True])
def test_losses_equal_plain_autograd(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """The gradients that are formed in the forward pass are autograd's, for any size of chunk."""
    torch.manual_seed(0)
    monkeypatch.setitem(unembedding_loss.CHUNK_ELEMENTS, "cpu", 3 * 50)
    monkeypatch.setattr(unembedding_loss, "LEAST_ROWS", 1)
    matrix, shift = torch.randn(50, 8), torch.randn(50) if bias else None
    states, tokens, weight = torch.randn(10, 8), torch.randint(50, (10,)), torch.randn(10)
    ours, plain = states.clone().requires_grad_(), states.clone().requires_grad_()
    direct = functional.log_softmax(functional.linear(plain, matrix, shift), -1).gather(1, tokens[:, None])[:, 0]
    actual = token_log_probs(ours, tokens, matrix, shift)
    torch.testing.assert_close(actual, direct)
    (actual * weight).sum().backward()
    (direct * weight).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)

    several, weights = torch.randint(50, (10, 4)), torch.randn(10, 4)
    ours, plain = states.clone().requires_grad_(), states.clone().requires_grad_()
    direct = functional.log_softmax(functional.linear(plain, matrix, shift), -1).gather(1, several)
    actual = token_log_probs(ours, several, matrix, shift)
    torch.testing.assert_close(actual, direct)
    (actual * weights).sum().backward()
    (direct * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)

    students, teacher, weights = torch.randn(3, 10, 8), torch.randn(10, 8), torch.randn(3, 10)
    ours, plain = students.clone().requires_grad_(), students.clone().requires_grad_()
    log_p = functional.log_softmax(functional.linear(teacher, matrix, shift), -1)
    log_q = functional.log_softmax(functional.linear(plain, matrix, shift), -1)
    direct = (log_p.exp() * (log_p - log_q)).sum(-1)
    actual, match = kl_to_teacher(ours, teacher, matrix, shift)
    torch.testing.assert_close(actual, direct)
    assert torch.equal(match, log_q.argmax(-1) == log_p.argmax(-1))
    (actual * weights).sum().backward()
    (direct * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)
