# SPDX-License-Identifier: Apache-2.0
"""The recurrent state of CP heads, which reads the sampled token and every draft:
cheap, nonlinear, shared by all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] to [rows, out]


def fused(hidden: torch.Tensor, size: int, fuse: Linear) -> torch.Tensor:
    """The first state, s_0 = e + W [RMSNorm(e); RMSNorm(h_l) of each layer l]: [rows,
    d].

    Args:
        hidden: e and the states after some layers, [rows, (1 + layers) d].
        size: d.
        fuse: W [d, (1 + layers) d].
    """
    return hidden[:, :size] + fuse(normed(hidden.unflatten(-1, (-1, size))).flatten(-2))


def advance(
    state: torch.Tensor,
    embedded: torch.Tensor,
    token: Linear,
    inner: Linear,
    outer: Linear,
) -> torch.Tensor:
    """The state after another token: s + V u + W_o (silu(W_g u) * W_i u), u =
    [RMSNorm(s); RMSNorm(E[token])].

    Args:
        state: s [rows, d] before it.
        embedded: E[token] [rows, d].
        token: [V; W_g; W_i], the columns that read the token, [d + 2 m, d].
        inner: the same, the columns that read the state, [d + 2 m, d].
        outer: W_o [d, m].
    """
    read = token(normed(embedded)) + inner(normed(state))
    size = state.shape[-1]
    gate, value = read[:, size:].chunk(2, dim=-1)
    return state + read[:, :size] + outer(functional.silu(gate) * value)


def normed(states: torch.Tensor) -> torch.Tensor:
    """RMSNorm without weights, which the following matrices include."""
    return functional.rms_norm(states, states.shape[-1:], eps=1e-6)


def of_experts(
    state: torch.Tensor, down: Linear | None, up: torch.Tensor | None
) -> torch.Tensor:
    """The state of each expert for the LM head, s + A_a B_a s: [rows, r, d]; the state
    alone for rank 1.

    Args:
        state: s [rows, d].
        down: every B_a, [r R, d]; None for rank 1.
        up: A [r, d, R]; None for rank 1.
    """
    if down is None or up is None:
        return state[:, None]
    thin = down(state).unflatten(-1, (len(up), -1)).transpose(0, 1)
    return state[:, None] + torch.bmm(thin, up.to(thin.dtype).mT).transpose(0, 1)


class Recurrence(nn.Module):
    """The recurrence s_t of s_{t-1} and the t-th token, and the low-rank experts on it;
    initially the identity.

    Args:
        size: d.
        inner_size: m, the width of the gated layer.
        rank: r, experts; a single expert is the state itself.
        expert_rank: R, the rank of the experts' differences.
        dtype: of the parameters.
        seed: of the matrices that are not zero; None leaves all zero, for those who
            load them.
        dropout: share of the gated layer that each training step leaves out.
        layers: of the target whose states are read beside the last.
    """

    def __init__(
        self,
        size: int,
        inner_size: int,
        rank: int,
        expert_rank: int,
        dtype: torch.dtype,
        seed: int | None,
        dropout: float = 0.0,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = dropout

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype))

        self.token = zeros(size + 2 * inner_size, size)
        self.inner = zeros(size + 2 * inner_size, size)
        self.outer = zeros(size, inner_size)
        self.down = zeros(rank, expert_rank, size) if rank > 1 else None
        self.up = zeros(rank, size, expert_rank) if rank > 1 else None
        self.fuse = zeros(size, (1 + layers) * size) if layers else None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            random = [
                self.token[size:],
                self.inner[size:],
                *([] if self.down is None else [self.down]),
            ]
            for matrix in random:
                matrix.detach().normal_(std=(2 * size) ** -0.5, generator=generator)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """s_0 [rows, d] from what is read of the target [rows, (1 + layers) d]."""
        fuse = self.fuse
        if fuse is None:
            return hidden
        return fused(
            hidden.to(fuse.dtype), len(fuse), lambda x: functional.linear(x, fuse)
        )

    def forward(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The state [rows, d] after a token of embeddings [rows, d]."""

        def outer(gated: torch.Tensor) -> torch.Tensor:
            return functional.linear(
                functional.dropout(gated, self.dropout, self.training), self.outer
            )

        dtype = self.token.dtype
        return advance(
            state.to(dtype),
            embedded.to(dtype),
            lambda x: functional.linear(x, self.token),
            lambda x: functional.linear(x, self.inner),
            outer,
        )

    def experts(self, state: torch.Tensor) -> torch.Tensor:
        """[rows, r, d]"""
        thin = None if self.down is None else self.down.flatten(0, 1)
        return of_experts(
            state,
            None if thin is None else lambda s: functional.linear(s, thin),
            self.up,
        )
