# SPDX-License-Identifier: Apache-2.0
"""Sampling that all drafters share: temperatures, noise, draws, and which drafts are
accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperature, as in vLLM's sampler
INVALID = -1  # stands for a draft that had no valid distribution
UNLIMITED = 1 << 30  # a top-k


class Sampling(NamedTuple):
    """The sampling parameters of each row.

    Tokens are drawn with the random numbers that vLLM's runner V2 uses for the target's
    (exponential).
    """

    temperature: Tensor  # [rows] float32; below 1e-5 the row takes the best token
    top_k: Tensor  # [rows], UNLIMITED: no limit
    top_p: Tensor  # [rows] float32 in (0, 1]
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, of the token before the drawn one

    def ahead(self, drafts: int) -> Sampling:
        """The settings for the position after a number of drafts."""
        return self._replace(positions=self.positions + drafts)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32; float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_greedy(temperature: Tensor) -> Tensor:
    """Whether each row takes the best token: bool, in the temperatures' shape."""
    return temperature < GREEDY_BELOW


def divisor(temperature: Tensor) -> Tensor:
    """The divisor of each row's logits, [rows, 1]: the temperature [rows], or 1 for greedy rows."""
    return torch.where(is_greedy(temperature), 1.0, temperature).unsqueeze(-1)


def least_weight(sampling: Sampling) -> Tensor:
    """The least weight exp((logit - peak) / T) of entries that are drawn: [rows].

    An entry of probability above 1 - p is always within top-p, and one above 1 / k
    within top-k. These bounds relative to the likeliest entry cost no search of the
    row, and lose no accepted drafts against the limits themselves (docs/methods.md).
    """
    return torch.maximum(1 - sampling.top_p, 1 / sampling.top_k)


WORD = (1 << 32) - 1
MULTIPLIERS = 0xCC9E2D51, 0x1B873593  # of a word
STEP = 5, 0xE6546B64  # from word to word
FINAL = 0x85EBCA6B, 0xC2B2AE35
BYTES = 16  # hashed per number


def exponential(
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64, of the token before the drawn one
    token_ids: Tensor,  # [entries] or [rows, entries] int64
) -> Tensor:
    """Standard exponential variates, whose negative logarithm is the noise: [rows,
    entries] float32.
    """
    state = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions):
        state = mixed(state, word & WORD)
    state = mixed(state[:, None], token_ids) ^ BYTES
    for shift, multiplier in zip((16, 13), FINAL, strict=True):
        state = ((state ^ (state >> shift)) * multiplier) & WORD
    state = state ^ (state >> 16)
    uniform = (state.double() + 0.5).mul_(2.0**-32).float()
    return -torch.log1p(-uniform.clamp_(max=1 - 2.0**-24))


def mixed(state: Any, word: Any) -> Any:
    """MurmurHash3's state after another 32-bit word; of numbers, or of tensors of them."""
    word = (word * MULTIPLIERS[0]) & WORD
    word = (rotated(word, 15) * MULTIPLIERS[1]) & WORD
    return (rotated(state ^ word, 13) * STEP[0] + STEP[1]) & WORD


def rotated(word: Any, bits: int) -> Any:
    """32-bit words, rotated to the left."""
    return ((word << bits) | (word >> (32 - bits))) & WORD


def draw_rows(
    logits: Tensor,  # [rows, entries] in any floating-point type
    sampling: Sampling,  # of each row
    # [entries] or [rows, entries] int64, the entries' IDs; None: 0, 1, ...
    token_ids: Tensor | None = None,
) -> Tensor:
    """Draw an entry of each row at its temperature, of those that reach least_weight;
    take the best at temperature 0.

    Returns:
        [rows] int64, INVALID where a row's greatest logit is not finite.
    """
    logits = at_least_float32(logits)
    peak, best = logits.max(dim=-1)
    # Raw logits overflow float32 at low temperatures.
    scores = (logits - peak[:, None]) / divisor(sampling.temperature)
    weights = scores.exp()
    outside = weights < least_weight(sampling)[:, None]
    drawn = draw_as(weights.masked_fill(outside, 0.0), sampling, token_ids)
    entries = torch.where(is_greedy(sampling.temperature), best, drawn)
    return torch.where(peak.isfinite(), entries, INVALID)


def draw_as(
    weights: Tensor, sampling: Sampling, token_ids: Tensor | None
) -> Tensor:
    """Draw an entry of each row in proportion to weights [rows, entries] with its
    request's random numbers: [rows] int64.

    An exponential race gives a sample without multinomial's wait for the device.
    """
    if token_ids is None:
        token_ids = torch.arange(weights.shape[1], device=weights.device)
    variates = exponential(sampling.seeds, sampling.positions, token_ids)
    return (weights / variates).argmax(dim=-1)


def accept_drawn(
    # [logits] int64, the token that the target draws at each position
    drawn: Tensor,
    # [logits] the input token of each row of logits; a draft, except in a request's
    # first row
    drafts: Tensor,
    # [requests + 1] int32, where each request's rows of logits begin
    starts: Tensor,
    width: int,  # K + 1
) -> tuple[Tensor, Tensor]:
    """Accept each request's drafts up to the first that differs from the drawn token;
    -1 means no draft.

    Returns:
        (tokens [requests, K + 1] in the drafts' type, counts [requests] int32 of the
        tokens that each request emits).
    """
    begin = starts[:-1, None].long()
    end = starts[1:, None].long()
    places = begin + torch.arange(width, device=drawn.device)
    inside = places.clamp(max=len(drawn) - 1)
    tokens = drawn[inside]
    follows = drafts[inside[:, 1:]]
    accepted = (tokens[:, :-1] == follows) & (places[:, 1:] < end)
    counts = accepted.cumprod(dim=1).sum(dim=1) + 1
    return tokens.to(drafts.dtype), counts.int()
