# SPDX-License-Identifier: Apache-2.0
"""Muon over a stack of matrices is torch.optim.Muon over each of them."""

import pytest
import torch
from torch import nn

from vllm_ppd.heads.training.optimizer import InFloat32, Muon

RATE = 1e-2
SHAPES = ((2, 3, 8, 8), (4, 8), (8,))  # a stack of matrices, a gate, and a vector


def seeded(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_each_matrix_of_a_stack_is_updated_as_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate is left to AdamW. In float32, as on a CPU that emulates bfloat16."""
    monkeypatch.setattr(
        "vllm_ppd.heads.training.optimizer.cpu_computes_bfloat16", bool
    )
    stack, gate, vector = ours = [nn.Parameter(tensor) for tensor in seeded(99)]
    optimizer = Muon(
        [
            {"params": [stack, vector], "lr": RATE},
            {"params": [gate], "lr": RATE, "muon": False},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    matrices = [nn.Parameter(m.clone()) for m in stack.detach().flatten(0, 1)]
    others = [nn.Parameter(tensor.detach().clone()) for tensor in (gate, vector)]
    theirs = [*matrices, *others]
    muon = torch.optim.Muon(
        matrices,
        lr=RATE,
        momentum=0.9,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    for number in range(3):
        of_stack, *rest = seeded(number)
        gradients = [of_stack, *rest, *of_stack.flatten(0, 1), *rest]
        for parameter, gradient in zip([*ours, *theirs], gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        with InFloat32():
            muon.step()
        adamw.step()
    expected = [torch.stack(matrices).view(SHAPES[0]), *others]
    for actual, tensor in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual.detach(), tensor.detach())
