# SPDX-License-Identifier: Apache-2.0
"""Muon over a stack of matrices is torch.optim.Muon over each of them, and continues
from its state.
"""

from typing import Any

import torch
from torch import nn

from vllm_ppd.heads.training.optimizer import Muon

RATE = 1e-2
SHAPES = ((2, 3, 8, 8), (4, 8), (8,))  # a stack of matrices, a gate, and a vector


def seeded(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def made() -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in seeded(99)]


def ours(parameters: list[nn.Parameter]) -> Muon:
    """The gate is left to AdamW."""
    stack, gate, vector = parameters
    return Muon(
        [
            {"params": [stack, vector], "lr": RATE},
            {"params": [gate], "lr": RATE, "muon": False},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


def step(optimizers: Any, parameters: Any, gradients: Any) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.step()


def test_each_matrix_of_a_stack_is_updated_as_by_torch() -> None:
    parameters = made()
    optimizer = ours(parameters)
    stack, *others = made()
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach().flatten(0, 1)]
    theirs = [
        torch.optim.Muon(
            matrices,
            lr=RATE,
            momentum=0.9,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for number in range(3):
        gradients = seeded(number)
        step([optimizer], parameters, gradients)
        step(
            theirs, [*matrices, *others], [*gradients[0].flatten(0, 1), *gradients[1:]]
        )
    expected = [torch.stack([*matrices]).view(SHAPES[0]), *others]
    for actual, tensor in zip(parameters, expected, strict=True):
        torch.testing.assert_close(actual.detach(), tensor.detach())
        assert actual.grad is not None, "gradients are the caller's to clear"


def test_it_continues_from_its_state() -> None:
    whole = made()
    parts = made()
    optimizer = ours(whole)
    stopped = ours(parts)
    for number in range(4):
        step([optimizer], whole, seeded(number))
    for number in range(4):
        if number == 2:
            state = stopped.state_dict()
            stopped = ours(parts)
            stopped.load_state_dict(state)
        step([stopped], parts, seeded(number))
    for actual, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(actual, expected)
