# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/gumbel.py: temperature, and draws with noise.

vLLM adds Gumbel noise to the logits and takes the greatest sum. The noise depends on
seed, position and token alone. It is made of 32 or 53 random bits and so is bounded: a
token can win only if its logit is within the noise's range of the greatest logit. Only
the noise of such tokens is computed. After top-k or top-p these are a handful.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy import ndarray

from vllm_ppd.kernels.sampling import (
    BYTES,
    FINAL,
    MULTIPLIERS,
    STEP,
    WORD,
    mixed,
    rotated,
)

DRAFT_SALT = 1 << 30  # added to the positions of draws that draft
SECOND_WORD = 0x9E3779B9  # where the hash of the upper 32 bits of 64 begins
# Noise is within (-2.82, 22.9) from 32 bits, and within (-3.63, 36.8) from 53.
RANGE_32 = 26.0
RANGE_53 = 41.0
# candidates, from which on those are left out first that lose by their random bits
MANY = 2048
FIRST_STEP = 64  # one of so many tokens gives a first sum to beat
SLACK = 1e-3  # for the rounding of sums
SERIES_BELOW = 0.25
ALMOST_ZERO = 2.0**-24


def apply_temperature(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    temperature: ndarray,  # [request rows]
) -> None:
    """Divide rows of logits by their temperature, unless it is 0 or 1."""
    values = temperature[expanded_idx_mapping]
    for row in np.flatnonzero((values != 0.0) & (values != 1.0)):
        logits[row] /= values[row]


def gumbel_sample(
    local_argmax: ndarray,  # [logits, blocks] int64, of each block of the vocabulary
    local_max: ndarray,  # [logits, blocks]
    logits_cache: torch.Tensor | None,
    logits: torch.Tensor,  # [logits, V]
    expanded_idx_mapping: ndarray,  # [logits] request rows, -1: padding
    seeds: ndarray,  # [request rows] int64
    pos: ndarray,  # [logits]
    temp: ndarray,  # [request rows]
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """Draw a token of each row: by the greatest logit at temperature 0, else by the
    greatest sum.

    The drawn token is written as the first block's. The other blocks lose against it.

    Raises:
        NotImplementedError: if logits are to be kept, as vLLM's own drafters ask for.
    """
    if logits_cache is not None:
        raise NotImplementedError(
            "vLLM's own drafters have no kernels on the CPU"
        )
    temperatures = np.where(
        expanded_idx_mapping >= 0, temp[expanded_idx_mapping], 0.0
    )
    all_values = logits.float().numpy()
    local_max[:, 0] = 0.0
    local_max[:, 1:] = -np.inf
    drawn = local_argmax[:, 0]
    drawn[:] = all_values.argmax(axis=-1)
    noise = noise_64 if USE_FP64 else noise_32
    noise_range = RANGE_53 if USE_FP64 else RANGE_32
    for row in np.flatnonzero(temperatures):
        values = all_values[row]
        if APPLY_TEMPERATURE:
            values = values / temperatures[row]
        candidates = np.flatnonzero(values >= values[drawn[row]] - noise_range)
        if len(candidates) < 2:
            continue
        seed = int(seeds[expanded_idx_mapping[row]])
        position = int(pos[row])
        if IS_DRAFTING:
            position += DRAFT_SALT
        if len(candidates) > MANY and not USE_FP64:
            candidates = contenders(
                values, candidates, int(drawn[row]), seed, position
            )
        sums = values[candidates] + noise(seed, position, candidates, len(values))
        drawn[row] = candidates[sums.argmax()]


def contenders(
    values: ndarray,  # [V] float32
    candidates: ndarray,  # [tokens]
    best: int,
    seed: int,
    position: int,
) -> ndarray:
    """The candidates whose sums with noise in float32 may be the greatest: [fewer
    tokens].

    The noise is -log(-log(1 - u)) <= -log(u), so a sum reaches s only if u <= exp(logit
    - s).
    """
    vocab_size = len(values)
    some = np.append(candidates[::FIRST_STEP], best)
    reached = (values[some] + noise_32(seed, position, some, vocab_size)).max()
    if not np.isfinite(reached):
        return candidates
    limits = np.exp(values[candidates] - (reached - np.float32(SLACK)))
    bits = hashes(seed, position, candidates, vocab_size)
    return candidates[bits.astype(np.float32) <= limits * 2.0**32]


def noise_32(
    seed: int, position: int, token_ids: ndarray, vocab_size: int
) -> ndarray:
    """Gumbel noise in float32 from 32 random bits a token, as vLLM's kernel rounds it."""
    bits = hashes(seed, position, token_ids, vocab_size)
    upper = (bits >> 16).astype(np.float32)
    lower = (bits & 0xFFFF).astype(np.float32)
    uniform = upper * 2.0**-16 + (lower + 0.5) * 2.0**-32
    return -np.log(-log_of_complement(uniform))


def noise_64(
    seed: int, position: int, token_ids: ndarray, vocab_size: int
) -> ndarray:
    """Gumbel noise in float64 from 53 random bits a token."""
    lower = hashes(seed, position, token_ids, vocab_size).astype(np.uint64)
    upper = hashes(seed, position, token_ids, vocab_size, SECOND_WORD).astype(
        np.uint64
    )
    bits = ((upper << 32) | lower) >> 11
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    uniform[uniform == 1.0] -= 2.0**-53
    return -np.log(-np.log(uniform))


def log_of_complement(uniform: ndarray) -> ndarray:
    """log(1 - u) in float32: a series of eight terms below SERIES_BELOW, as vLLM's kernel."""
    series = np.full_like(uniform, 1 / 8)
    for divisor in range(7, 0, -1):
        series *= uniform
        series += 1 / divisor
    logarithms = np.log(np.maximum(1.0 - uniform, ALMOST_ZERO))
    return np.where(uniform < SERIES_BELOW, -uniform * series, logarithms)


def hashes(
    seed: int, position: int, token_ids: ndarray, vocab_size: int, start: int = 0
) -> ndarray:
    """MurmurHash3 of (seed, position, token): [tokens] uint32.

    The hash mixes one 32-bit word after the other into its state. The last is the
    token's.
    """
    state = start
    for word in (seed, seed >> 32, position):
        state = mixed(state, word & WORD)
    hashed = token_words(vocab_size)[token_ids]
    hashed ^= state
    hashed = (hashed << 13) | (hashed >> 19)
    hashed *= STEP[0]
    hashed += STEP[1]
    hashed ^= BYTES
    for shift, multiplier in zip((16, 13), FINAL, strict=True):
        hashed ^= hashed >> shift
        hashed *= multiplier
    hashed ^= hashed >> 16
    return hashed


@lru_cache(maxsize=4)
def token_words(vocab_size: int) -> ndarray:
    """What each token ID, as a word, adds to the hash: [V] uint32."""
    words = np.arange(vocab_size, dtype=np.uint32) * MULTIPLIERS[0]
    return rotated(words, 15) * MULTIPLIERS[1]
