# SPDX-License-Identifier: Apache-2.0
"""Where the transforms start: a ridge regression of the target's later states, which needs no training step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_ppd.heads.cp.module import CPHead

PENALTY = 1e-3  # relative to the mean square of what is read
TOKENS = 1 << 16  # that the regression reads, if the data has so many

# Of each row: states [rows, positions, d], the first one read and the others predicted, and embeddings of the tokens
# [rows, positions - 1, d] sampled from all but the last of them.
Rows = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def ridge_start(head: CPHead, rows: Iterable[Rows]) -> None:
    """Set transforms and what reads tokens so that the states are nearest to the target's own at each position.

    The state that position s's token is sampled from, h_{t+s-1}, is predicted from h_t, and E[b] and E[x_{s-1}] where
    the head reads them, by least squares. All experts start there, each beside its own noise.

    Raises:
        ValueError: if the head is not factorised.
    """
    if head.transforms is None:
        raise ValueError("whole classifiers start at the LM head; a regression gives transforms")
    d, n = head.gate.shape[1], head.positions
    tokens = {"none": 0, "token": 1, "chain": n - 1}[head.condition]
    size = (1 + tokens) * d
    gram = torch.zeros(size, size, dtype=torch.float64)
    product = torch.zeros(size, n * d, dtype=torch.float64)
    for states, embedded in rows:
        read = torch.cat([states[:, 0], embedded[:, :tokens].flatten(1)], dim=1).float()
        gram += (read.T @ read).double().cpu()
        product += (read.T @ states.float().flatten(1)).double().cpu()
    device = head.transforms.device
    for index, position in enumerate(range(head.lead, n)):
        blocks = [0, *([1] if tokens else []), *([position] if head.condition == "chain" and index else [])]
        solved = _solve(gram, product[:, position * d : (position + 1) * d], blocks, d)
        matrices = [part.T.to(device, head.transforms.dtype) for part in solved.split(d)]
        head.transforms[index] += matrices[0] - torch.eye(d, device=device)
        if head.token is not None:
            head.token[index] = matrices[1]
        if head.previous is not None and index:
            head.previous[index - 1] = matrices[2]


def _solve(gram: torch.Tensor, product: torch.Tensor, blocks: list[int], d: int) -> torch.Tensor:
    """Coefficients [blocks * d, d] of the states on some blocks of what is read, each penalised by its own scale."""
    index = torch.cat([torch.arange(block * d, (block + 1) * d) for block in blocks])
    chosen = gram[index][:, index]
    scale = chosen.diagonal().view(-1, d).mean(dim=1, keepdim=True).clamp(min=1e-12).expand(-1, d).flatten()
    return torch.linalg.solve(chosen + PENALTY * scale.diag(), product[index])
