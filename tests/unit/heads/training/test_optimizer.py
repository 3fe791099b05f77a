# SPDX-License-Identifier: Apache-2.0
"""Muon over a stack of matrices is torch.optim.Muon over each of them, and continues
from its state.
"""

from typing import Any

import torch
from torch import nn

from vllm_ppd.heads.training.optimizer import Muon

RATE = 1e-2


def made() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """A stack of matrices, a matrix that is left to AdamW, and a vector."""
    torch.manual_seed(0)
    return (
        nn.Parameter(torch.randn(2, 3, 8, 8)),
        nn.Parameter(torch.randn(4, 8)),
        nn.Parameter(torch.randn(8)),
    )


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(shape, generator=generator)
        for shape in ((2, 3, 8, 8), (4, 8), (8,))
    ]


def ours(parameters: Any) -> Muon:
    stack, gate, vector = parameters
    return Muon(
        [
            {"params": [stack, vector], "lr": RATE},
            {"params": [gate], "lr": RATE, "muon": False},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


def step(optimizer: torch.optim.Optimizer, parameters: Any, number: int) -> None:
    for parameter, gradient in zip(parameters, gradients(number), strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_each_matrix_of_a_stack_is_updated_as_by_torch() -> None:
    parameters = made()
    optimizer = ours(parameters)
    stack, *others = made()
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach().flatten(0, 1)]
    muon = torch.optim.Muon(
        matrices,
        lr=RATE,
        momentum=0.9,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(3):
        step(optimizer, parameters, number)
        gradient, *rest = gradients(number)
        for matrix, part in zip(matrices, gradient.flatten(0, 1), strict=True):
            matrix.grad = part
        muon.step()
        for parameter, part in zip(others, rest, strict=True):
            parameter.grad = part
        adamw.step()
    torch.testing.assert_close(
        parameters[0].detach().flatten(0, 1),
        torch.stack([m.detach() for m in matrices]),
    )
    for actual, expected in zip(parameters[1:], others, strict=True):
        torch.testing.assert_close(actual, expected)
    assert all(parameter.grad is not None for parameter in parameters), (
        "gradients are the caller's to clear"
    )


def test_it_continues_from_its_state() -> None:
    whole = made()
    parts = made()
    optimizer = ours(whole)
    stopped = ours(parts)
    for number in range(4):
        step(optimizer, whole, number)
    for number in range(2):
        step(stopped, parts, number)
    again = ours(parts)
    again.load_state_dict(stopped.state_dict())
    for number in range(2, 4):
        step(again, parts, number)
    for actual, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(actual, expected)
