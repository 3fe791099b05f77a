# SPDX-License-Identifier: Apache-2.0
"""The random numbers of vLLM's runner V2, a function of a request's seed, a position, and a token ID.

vLLM adds Gumbel noise to the target's logits and takes the greatest sum. A drafter that adds the same noise to its
logits picks the target's token wherever the distributions agree, and with a probability of at least (1 - d) / (1 + d),
where d is their total variation distance (Daliri et al., "Coupling without Communication and Drafter-Invariant
Speculative Decoding"). The hash is 32-bit MurmurHash3.
"""

import torch

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


def exponential(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, whose negative logarithm is the noise; arguments as in uniform."""
    return -torch.log1p(-uniform(seeds, positions, token_ids).clamp_(max=1 - 2.0**-24))


def _mixed(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * MULTIPLIERS[0]) & WORD
    word = (_rotated(word, 15) * MULTIPLIERS[1]) & WORD
    return (_rotated(state ^ word, 13) * STEP[0] + STEP[1]) & WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD
