# SPDX-License-Identifier: Apache-2.0
"""Drafts from the experts' states, by whatever reads them: a head's own matrices, or an engine's packed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from vllm_ppd.kernels.cp_mixture import at_least_float32, draft_next
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling


def log_gate(
    hidden: torch.Tensor,  # [rows, d], normed
    gate: torch.Tensor,  # [r, d], W_h
    token: torch.Tensor | None = None,  # [rows, d], E[b]
    token_gate: torch.Tensor | None = None,  # [r, d], W_b
) -> torch.Tensor:
    """log w = log_softmax(W_h e + W_b E[b]) (eq. 7, where no token is read): [rows, r]."""
    logits = functional.linear(hidden.to(gate.dtype), gate)
    if token is not None and token_gate is not None:
        logits = logits + functional.linear(token.to(token_gate.dtype), token_gate)
    return torch.log_softmax(at_least_float32(logits), dim=-1)


def draft_in_sequence(
    log_weights: torch.Tensor,  # [rows, r], before the first draft
    states: torch.Tensor,  # [rows, n, r, d], without what they read of drafts
    read: Callable[[torch.Tensor], torch.Tensor],  # states [rows, r, d] to logits [rows, r, vocab]
    shift: Callable[
        [int, torch.Tensor], torch.Tensor
    ],  # (0.., the draft [rows] before the next) to V E[draft] [rows, d]
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts whose states read the draft before (condition chain), as kernels.cp_mixture.draft_chain returns them."""
    tokens: list[torch.Tensor] = []
    distributions = []
    for position, unread in enumerate(states.unbind(dim=1)):
        logits = read(unread if position == 0 else unread + shift(position - 1, tokens[-1])[:, None])
        token, probs, log_weights = chosen(draft_next, logits)(log_weights, logits, sampling, generator)
        tokens.append(token)
        distributions.append(probs)
    return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1)
