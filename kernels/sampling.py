# SPDX-License-Identifier: Apache-2.0
"""Sampling that all drafters share: temperatures, distributions and draws."""

from __future__ import annotations

from typing import NamedTuple

import torch

GREEDY_BELOW = 1e-5  # temperature, as in vLLM's sampler
INVALID = -1  # stands for a draft that had no valid distribution


class Sampling(NamedTuple):
    """The sampling parameters of each row, which apply in vLLM's order: temperature, top-k, top-p.

    With seeds and positions, tokens are drawn with the random numbers that vLLM's runner V2 uses for the target's
    (kernels/noise.py).
    """

    temperature: torch.Tensor  # [rows] float32; below 1e-5 the row takes the best token
    top_k: torch.Tensor | None = None  # [rows] int; the vocabulary's size where a row has no limit
    top_p: torch.Tensor | None = None  # [rows] float32 in (0, 1]
    seeds: torch.Tensor | None = None  # [rows] int64; None: draw with torch's generator
    positions: torch.Tensor | None = None  # [rows] int64, of the token before the drawn one

    def at(self, index: torch.Tensor | slice) -> Sampling:
        """The settings of the rows at an index."""
        return Sampling(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]

    def ahead(self, drafts: int) -> Sampling:
        """The settings for the position after a number of drafts."""
        return self if self.positions is None else self._replace(positions=self.positions + drafts)


def is_greedy(temperature: torch.Tensor) -> torch.Tensor:
    """Whether each row takes the best token: bool, in the temperatures' shape."""
    return temperature < GREEDY_BELOW


def divisor(temperature: torch.Tensor) -> torch.Tensor:
    """The divisor of each row's logits, [rows, 1]: the temperature [rows], or 1 for greedy rows."""
    return torch.where(is_greedy(temperature), 1.0, temperature).unsqueeze(-1)


def known_unlimited(limits: torch.Tensor, bound: float) -> bool:
    """Whether no row's limit is below a bound; checked only on the CPU, without a wait, to save a slow sort."""
    return limits.device.type == "cpu" and bool((limits >= bound).all())


def truncated(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Cut distributions [rows, entries] to the rows' top-k and top-p and renormalise them.

    The k most probable entries are kept, and of those the fewest that together hold p of their mass; entries that tie
    with the last kept entry stay, too. Without limits, the distributions are returned as they are.
    """
    entries, top_k, top_p = probs.shape[-1], sampling.top_k, sampling.top_p
    top_k = None if top_k is None or known_unlimited(top_k, entries) else top_k
    top_p = None if top_p is None or known_unlimited(top_p, 1) else top_p
    if top_k is None and top_p is None:
        return probs
    ascending = probs.sort(dim=-1).values
    if top_k is not None:
        last = (entries - top_k.long()).clamp(min=0, max=entries - 1)
        ascending = torch.where(ascending < ascending.gather(-1, last[:, None]), 0.0, ascending)
    if top_p is not None:
        below = ascending.cumsum(dim=-1)
        dropped = below <= (1 - top_p.to(below.dtype))[:, None] * below[:, -1:]
        dropped[:, -1] = False
        ascending = ascending.masked_fill(dropped, 0.0)
    least = torch.where(ascending > 0, ascending, torch.inf).amin(dim=-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Softmax of logits [rows, entries] at the rows' temperatures, cut to their top-k and top-p: float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return truncated(torch.softmax(logits / divisor(sampling.temperature), dim=-1), sampling)


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw an index in proportion to the weights [..., entries], which need not sum to 1: [...] int64.

    An exponential race gives a sample without multinomial's wait for the device; tensor-parallel ranks, whose
    generators are in the same state, draw the same index. An entry of weight 0 is drawn only if all weights are 0.
    """
    return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(dim=-1)
