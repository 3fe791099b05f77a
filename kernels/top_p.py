# SPDX-License-Identifier: Apache-2.0
"""Top-p of logits without a sort of the vocabulary, which on a CPU takes longer than a small model's forward pass."""

import torch

BEST = 512  # entries looked at first; rows whose mass is spread further are sorted whole


def mask_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set entries outside each row's top-p to -inf, in place; entries that tie with the last kept entry stay.

    Args:
        logits: [rows, entries] float32, temperatures applied.
        top_p: [rows] float32 in (0, 1].

    Returns:
        The logits.
    """
    mass = logits.logsumexp(dim=-1, keepdim=True)
    best = logits.topk(min(BEST, logits.shape[-1]), dim=-1).values
    least, held = _least_kept(best, mass, top_p)
    spread = ((held < top_p) & (top_p < 1)).nonzero().squeeze(1)
    if len(spread):
        least[spread], _ = _least_kept(logits[spread].sort(dim=-1, descending=True).values, mass[spread], top_p[spread])
    least = torch.where(top_p < 1, least, -torch.inf)
    return logits.masked_fill_(logits < least[:, None], -torch.inf)


def _least_kept(
    descending: torch.Tensor,  # [rows, best]
    mass: torch.Tensor,  # [rows, 1] logarithm of the whole mass
    top_p: torch.Tensor,  # [rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the smallest logit that is kept [rows], the share of the mass that was considered [rows])."""
    probs = (descending - mass).exp()
    total = probs.cumsum(dim=-1)
    kept = ((total - probs) < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    return descending.gather(-1, kept - 1).squeeze(-1), total[:, -1]
