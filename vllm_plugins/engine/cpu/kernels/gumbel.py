# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/gumbel.py: temperature, and draws with noise.

vLLM adds Gumbel noise to the logits and takes the greatest sum. The noise depends on
seed, position and token alone. It is made of 32 or 53 random bits and so is bounded: a
token can win only if its logit is within the noise's range of the greatest logit. Only
the noise of such tokens is computed. After top-k or top-p these are a handful.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_ppd.kernels.sampling import BYTES, FINAL, MULTIPLIERS, STEP, WORD
from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import as_float32

DRAFT_SALT = 1 << 30  # added to the positions of draws that draft
SECOND_WORD = 0x9E3779B9  # where the hash of the upper 32 bits of 64 begins
# Noise is within (-2.82, 22.9) from 32 bits, and within (-3.63, 36.8) from 53.
RANGE_32 = 26.0
RANGE_53 = 41.0
# candidates, from which on those are left out first that lose by their random bits
MANY = 2048
FIRST_STEP = 64  # one of so many tokens gives a first sum to beat
SLACK = 1e-3  # for the rounding of sums
SERIES_BELOW = np.float32(0.25)
ALMOST_ZERO = np.float32(2.0**-24)


def apply_temperature(
    logits: torch.Tensor,  # [logits, V] float32, changed in place
    logits_stride: int,
    rows: torch.Tensor,  # [logits]
    temperatures: torch.Tensor,  # [request rows]
    vocab_size: int,
    **launch: Any,
) -> None:
    """Divide rows of logits by their temperature, unless it is 0 or 1."""
    values = temperatures.numpy()[rows.numpy()]
    logits_np = logits.numpy()
    for row in np.flatnonzero((values != 0.0) & (values != 1.0)):
        logits_np[row] /= values[row]


def gumbel_sample(
    # [logits, blocks] int64, of each block of the vocabulary
    local_argmax: torch.Tensor,
    local_argmax_stride: int,
    local_max: torch.Tensor,  # [logits, blocks]
    local_max_stride: int,
    cached_logits: torch.Tensor | None,
    cached_logits_stride_0: int,
    cached_logits_stride_1: int,
    cached_logits_column: torch.Tensor | None,
    cached_logits_source: torch.Tensor | None,
    cached_logits_source_stride: int,
    logits: torch.Tensor,  # [logits, V]
    logits_stride: int,
    rows: torch.Tensor,  # [logits], -1: padding
    seeds: torch.Tensor,  # [request rows] int64
    positions: torch.Tensor,  # [logits]
    temperatures: torch.Tensor,  # [request rows]
    vocab_size: int,
    IS_DRAFTING: bool = False,
    APPLY_TEMPERATURE: bool = True,
    USE_FP64: bool = False,
    **launch: Any,
) -> None:
    """Draw a token of each row: by the greatest logit at temperature 0, else by the
    greatest sum.

    The drawn token is written as the first block's. The other blocks lose against it.

    Raises:
        NotImplementedError: if logits are to be kept, as vLLM's own drafters ask for.
    """
    if cached_logits is not None:
        raise NotImplementedError("vLLM's own drafters have no kernels on the CPU")
    rows_np = rows.numpy()
    chosen_temperatures = np.where(
        rows_np >= 0, temperatures.numpy()[rows_np], np.float32(0.0)
    )
    logits_np = as_float32(logits)
    maxima = local_max.numpy()
    maxima[:, 0] = 0.0
    maxima[:, 1:] = -np.inf
    drawn = local_argmax.numpy()[:, 0]
    drawn[:] = logits_np.argmax(axis=-1)
    noise = noise_64 if USE_FP64 else noise_32
    noise_range = RANGE_53 if USE_FP64 else RANGE_32
    for row in np.flatnonzero(chosen_temperatures):
        values = logits_np[row]
        if APPLY_TEMPERATURE:
            values = values / chosen_temperatures[row]
        candidates = np.flatnonzero(
            values >= values[drawn[row]] - np.float32(noise_range)
        )
        if len(candidates) < 2:
            continue
        seed = int(seeds[rows_np[row]])
        position = int(positions[row])
        if IS_DRAFTING:
            position += DRAFT_SALT
        if len(candidates) > MANY and not USE_FP64:
            candidates = contenders(values, candidates, int(drawn[row]), seed, position)
        sums = values[candidates] + noise(seed, position, candidates, vocab_size)
        drawn[row] = candidates[sums.argmax()]


def contenders(
    values: np.ndarray,  # [V] float32
    candidates: np.ndarray,  # [tokens]
    best: int,
    seed: int,
    position: int,
) -> np.ndarray:
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
    limits *= np.float32(2.0**32)
    bits = hashes(seed, position, candidates, vocab_size)
    return candidates[bits.astype(np.float32) <= limits]


def noise_32(
    seed: int, position: int, token_ids: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Gumbel noise in float32 from 32 random bits a token, as vLLM's kernel rounds it."""
    bits = hashes(seed, position, token_ids, vocab_size)
    upper = (bits >> np.uint32(16)).astype(np.float32)
    lower = (bits & np.uint32(0xFFFF)).astype(np.float32)
    uniform = upper * np.float32(2.0**-16) + (lower + np.float32(0.5)) * np.float32(
        2.0**-32
    )
    return -np.log(-log_of_complement(uniform))


def noise_64(
    seed: int, position: int, token_ids: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Gumbel noise in float64 from 53 random bits a token."""
    lower = hashes(seed, position, token_ids, vocab_size).astype(np.uint64)
    upper = hashes(seed, position, token_ids, vocab_size, SECOND_WORD).astype(np.uint64)
    bits = ((upper << np.uint64(32)) | lower) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    uniform[uniform == 1.0] -= 2.0**-53
    return -np.log(-np.log(uniform))


def log_of_complement(uniform: np.ndarray) -> np.ndarray:
    """log(1 - u) in float32: a series of eight terms below SERIES_BELOW, as vLLM's kernel."""
    series = np.full_like(uniform, 1 / 8)
    for divisor in range(7, 0, -1):
        series *= uniform
        series += np.float32(1 / divisor)
    logarithms = np.log(np.maximum(np.float32(1.0) - uniform, ALMOST_ZERO))
    return np.where(uniform < SERIES_BELOW, -uniform * series, logarithms)


def hashes(
    seed: int, position: int, token_ids: np.ndarray, vocab_size: int, start: int = 0
) -> np.ndarray:
    """MurmurHash3 of (seed, position, token): [tokens] uint32.

    The hash mixes one 32-bit word after the other into its state. The last is the
    token's.
    """
    state = start
    for word in (seed & WORD, (seed >> 32) & WORD, position & WORD):
        state = stepped(rotated(state ^ mixed_word(word), 13)) & WORD
    hashed = token_words(vocab_size)[token_ids]
    hashed ^= np.uint32(state)
    hashed = rotated_words(hashed, 13)
    hashed *= np.uint32(STEP[0])
    hashed += np.uint32(STEP[1])
    hashed ^= np.uint32(BYTES)
    for shift, multiplier in zip((16, 13), FINAL, strict=True):
        hashed ^= hashed >> np.uint32(shift)
        hashed *= np.uint32(multiplier)
    hashed ^= hashed >> np.uint32(16)
    return hashed


@lru_cache(maxsize=4)
def token_words(vocab_size: int) -> np.ndarray:
    """What each token ID, as a word, adds to the hash: [V] uint32."""
    words = np.arange(vocab_size, dtype=np.uint32)
    words *= np.uint32(MULTIPLIERS[0])
    words = rotated_words(words, 15)
    words *= np.uint32(MULTIPLIERS[1])
    return words


def mixed_word(word: int) -> int:
    return rotated((word * MULTIPLIERS[0]) & WORD, 15) * MULTIPLIERS[1] & WORD


def stepped(state: int) -> int:
    return state * STEP[0] + STEP[1]


def rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & WORD


def rotated_words(words: np.ndarray, bits: int) -> np.ndarray:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
