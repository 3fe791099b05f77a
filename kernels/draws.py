# SPDX-License-Identifier: Apache-2.0
"""Draws from rows of logits with the requests' sampling parameters."""

import torch

from vllm_ppd.kernels.noise import exponential
from vllm_ppd.kernels.sampling import INVALID, Sampling, distribution, draw, is_greedy


def draw_rows(
    logits: torch.Tensor,  # [rows, entries] in any floating-point type
    sampling: Sampling,  # of each row
    token_ids: torch.Tensor | None = None,  # [entries] or [rows, entries] int64, the entries' IDs; None: 0, 1, ...
) -> torch.Tensor:
    """Draw an entry of each row at its temperature, within its top-k and top-p; take the best at temperature 0.

    Returns:
        [rows] int64, INVALID where a row's greatest logit is not finite.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak, best = logits.max(dim=-1)
    probs = distribution(logits - peak[:, None], sampling)  # raw logits overflow float32 at low temperatures
    entries = torch.where(is_greedy(sampling.temperature), best, draw_as(probs, sampling, token_ids))
    return torch.where(peak.isfinite(), entries, INVALID)


def draw_as(probs: torch.Tensor, sampling: Sampling, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Draw an entry of each row of probabilities [rows, entries] with its request's random numbers: [rows] int64."""
    if sampling.seeds is None or sampling.positions is None:
        return draw(probs)
    if token_ids is None:
        token_ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs / exponential(sampling.seeds, sampling.positions, token_ids)).argmax(dim=-1)
