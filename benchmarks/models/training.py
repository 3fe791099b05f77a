# SPDX-License-Identifier: Apache-2.0
"""The training loop of the demo model and of its peers: Muon and AdamW, warm-up and a cosine, in bfloat16."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from tqdm import tqdm

LOWEST = 0.02  # of the peak learning rates, at the end


def muon_and_adamw(model: nn.Module, matrices: list[nn.Parameter], matrix_rate: float,
                   rate: float) -> list[torch.optim.Optimizer]:  # fmt: skip
    """Muon for a model's matrices, which needs a quarter of AdamW's tokens at this size, and AdamW for the rest."""
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def window(ids: torch.Tensor, step: int, count: int, length: int, seed: int) -> torch.Tensor:
    """Windows [count, length] of token ids; which ones depends on step and seed alone, so that runs can be resumed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - length, (count,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts.tolist()]).long()


def spaced(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Evenly spaced windows [count, length] of token ids."""
    starts = torch.linspace(0, len(ids) - length - 1, count).long()
    return torch.stack([ids[start : start + length] for start in starts.tolist()]).long()


def fit(
    loss_of: Callable[[int], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    warm_up: int,
    clipped: Sequence[Sequence[nn.Parameter]],
    first: int = 0,
    after: Callable[[int], None] = lambda step: None,
    device: str = "cpu",
) -> None:
    """Minimise loss_of(step).

    Args:
        loss_of: the loss of a step's tokens.
        optimizers: with their peak learning rates.
        steps: in all.
        warm_up: steps until the peak.
        clipped: parameters whose gradient's norm is clipped to 1 together.
        first: step to begin with.
        after: is called with the number of steps that are done.
        device: type of the device that computes.

    Raises:
        SystemExit: if the loss is not finite.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
    progress = tqdm(range(first, steps), initial=first, total=steps, mininterval=5)
    for step in progress:
        scale = min((step + 1) / warm_up, LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(step)
        if not torch.isfinite(loss):
            sys.exit(f"training diverged at step {step}: loss {loss.item()}; lower the learning rate")
        loss.backward()
        for parameters in clipped:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
        after(step + 1)
