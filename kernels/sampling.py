# SPDX-License-Identifier: Apache-2.0
"""Sampling that all drafters share: temperatures, distributions, noise, draws, and
which drafts are accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

GREEDY_BELOW = 1e-5  # temperature, as in vLLM's sampler
INVALID = -1  # stands for a draft that had no valid distribution


class Sampling(NamedTuple):
    """The sampling parameters of each row, which apply in vLLM's order: temperature,
    top-k, top-p.

    With seeds and positions, tokens are drawn with the random numbers that vLLM's
    runner V2 uses for the target's (exponential).
    """

    temperature: torch.Tensor  # [rows] float32; below 1e-5 the row takes the best token
    # [rows] int; the vocabulary's size where a row has no limit
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None  # [rows] float32 in (0, 1]
    seeds: torch.Tensor | None = None  # [rows] int64; None: draw with torch's generator
    # [rows] int64, of the token before the drawn one
    positions: torch.Tensor | None = None

    def at(self, index: torch.Tensor | slice) -> Sampling:
        """The settings of the rows at an index."""
        parts: Any = (None if part is None else part[index] for part in self)
        return Sampling(*parts)

    def ahead(self, drafts: int) -> Sampling:
        """The settings for the position after a number of drafts."""
        return (
            self
            if self.positions is None
            else self._replace(positions=self.positions + drafts)
        )


def is_greedy(temperature: torch.Tensor) -> torch.Tensor:
    """Whether each row takes the best token: bool, in the temperatures' shape."""
    return temperature < GREEDY_BELOW


def divisor(temperature: torch.Tensor) -> torch.Tensor:
    """The divisor of each row's logits, [rows, 1]: the temperature [rows], or 1 for greedy rows."""
    return torch.where(is_greedy(temperature), 1.0, temperature).unsqueeze(-1)


def known_unlimited(limits: torch.Tensor, bound: float) -> bool:
    """Whether no row's limit is below a bound; checked only on the CPU, without a wait,
    to save a slow sort.
    """
    return limits.device.type == "cpu" and bool((limits >= bound).all())


def truncated(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Cut distributions [rows, entries] to the rows' top-k and top-p and renormalise
    them.

    The k most probable entries are kept, and of those the fewest that together hold p
    of their mass; entries that tie with the last kept entry stay, too. Without limits,
    the distributions are returned as they are.
    """
    entries = probs.shape[-1]
    top_k = sampling.top_k
    top_p = sampling.top_p
    top_k = None if top_k is None or known_unlimited(top_k, entries) else top_k
    top_p = None if top_p is None or known_unlimited(top_p, 1) else top_p
    if top_k is None and top_p is None:
        return probs
    ascending = probs.sort(dim=-1).values
    if top_k is not None:
        last = (entries - top_k.long()).clamp(min=0, max=entries - 1)
        ascending = torch.where(
            ascending < ascending.gather(-1, last[:, None]), 0.0, ascending
        )
    if top_p is not None:
        below = ascending.cumsum(dim=-1)
        dropped = below <= (1 - top_p.to(below.dtype))[:, None] * below[:, -1:]
        dropped[:, -1] = False
        ascending = ascending.masked_fill(dropped, 0.0)
    least = torch.where(ascending > 0, ascending, torch.inf).amin(dim=-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Softmax of logits [rows, entries] at the rows' temperatures, cut to their top-k
    and top-p: float32 or float64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return truncated(
        torch.softmax(logits / divisor(sampling.temperature), dim=-1), sampling
    )


def draw(
    weights: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw an index in proportion to the weights [..., entries], which need not sum to
    1: [...] int64.

    An exponential race gives a sample without multinomial's wait for the device;
    tensor-parallel ranks, whose generators are in the same state, draw the same index.
    An entry of weight 0 is drawn only if all weights are 0.
    """
    return (
        weights / torch.empty_like(weights).exponential_(generator=generator)
    ).argmax(dim=-1)


WORD = (1 << 32) - 1
MULTIPLIERS = 0xCC9E2D51, 0x1B873593  # of a word
STEP = 5, 0xE6546B64  # from word to word
FINAL = 0x85EBCA6B, 0xC2B2AE35
BYTES = 16  # hashed per number


def uniform(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64, of the token before the drawn one
    token_ids: torch.Tensor,  # [entries] or [rows, entries] int64
) -> torch.Tensor:
    """Uniform numbers in (0, 1]: [rows, entries] float32."""
    state = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions):
        state = _mixed(state, word & WORD)
    state = _mixed(state[:, None], token_ids) ^ BYTES
    for shift, multiplier in zip((16, 13), FINAL, strict=True):
        state = ((state ^ (state >> shift)) * multiplier) & WORD
    state = state ^ (state >> 16)
    return (state.double() + 0.5).mul_(2.0**-32).float()


def exponential(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard exponential variates, whose negative logarithm is the noise; arguments
    as in uniform.
    """
    return -torch.log1p(-uniform(seeds, positions, token_ids).clamp_(max=1 - 2.0**-24))


def _mixed(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * MULTIPLIERS[0]) & WORD
    word = (_rotated(word, 15) * MULTIPLIERS[1]) & WORD
    return (_rotated(state ^ word, 13) * STEP[0] + STEP[1]) & WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD


def draw_rows(
    logits: torch.Tensor,  # [rows, entries] in any floating-point type
    sampling: Sampling,  # of each row
    token_ids: torch.Tensor
    # [entries] or [rows, entries] int64, the entries' IDs; None: 0, 1, ...
    | None = None,
) -> torch.Tensor:
    """Draw an entry of each row at its temperature, within its top-k and top-p; take
    the best at temperature 0.

    Returns:
        [rows] int64, INVALID where a row's greatest logit is not finite.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak, best = logits.max(dim=-1)
    # Raw logits overflow float32 at low temperatures
    probs = distribution(logits - peak[:, None], sampling)
    entries = torch.where(
        is_greedy(sampling.temperature), best, draw_as(probs, sampling, token_ids)
    )
    return torch.where(peak.isfinite(), entries, INVALID)


def draw_as(
    probs: torch.Tensor, sampling: Sampling, token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Draw an entry of each row of probabilities [rows, entries] with its request's
    random numbers: [rows] int64.
    """
    if sampling.seeds is None or sampling.positions is None:
        return draw(probs)
    if token_ids is None:
        token_ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs / exponential(sampling.seeds, sampling.positions, token_ids)).argmax(
        dim=-1
    )


def accept_drawn(
    # [logits] int64, the token that the target draws at each position
    drawn: torch.Tensor,
    # [logits] the input token of each row of logits; a draft, except in a request's
    # first row
    drafts: torch.Tensor,
    # [requests + 1] int32, where each request's rows of logits begin
    starts: torch.Tensor,
    width: int,  # K + 1
) -> tuple[torch.Tensor, torch.Tensor]:
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
    return tokens.to(drafts.dtype), (accepted.cumprod(dim=1).sum(dim=1) + 1).int()
