# SPDX-License-Identifier: Apache-2.0
"""Kernels of structured_outputs.py, metrics/logits.py and of sample: min_p.py, output.py,
logprob.py, prompt_logprob.py and gumbel.py.

vLLM adds Gumbel noise to the logits and takes the greatest sum. The noise depends on
seed, position and token alone. It is made of 32 or 53 random bits and so is bounded: a
token can win only if its logit is within the noise's range of the greatest logit. Only
the noise of such tokens is computed. After top-k or top-p these are a handful.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from vllm_ppd.kernels.sampling import (
    BYTES,
    FINAL,
    MULTIPLIERS,
    STEP,
    WORD,
    mixed,
    rotated,
)
from vllm_ppd.vllm_plugins.engine.cpu.tables import (
    counted_from,
    lengths_between,
    spans,
    unpacked,
)

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


def apply_min_p(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    min_p: ndarray,  # [request rows]
) -> None:
    """Drop tokens less likely than a share of the likeliest's probability."""
    shares = min_p[expanded_idx_mapping]
    for row in np.flatnonzero(shares):
        values = logits[row]
        values[values < values.max() + np.log(shares[row])] = -np.inf


def compact_sampling_mask(
    logits: Tensor,  # [logits, V]
    cu_num_logits: ndarray,  # [requests + 1]
    num_sampled_tokens: ndarray,  # [requests]
    token_ids: ndarray,  # [requests x ROWS_PER_REQUEST, max_num_kept] int32
    packed_mask: ndarray,  # [requests x ROWS_PER_REQUEST, V / 8] uint8
    counts: ndarray,  # [requests x ROWS_PER_REQUEST] int32
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """The tokens that each sampled token was drawn from: first IDs, their number, and a
    bit each.
    """
    counts[:] = 0
    requests, slots = spans(num_sampled_tokens)
    for request, slot in zip(requests, slots, strict=True):
        output_row = request * ROWS_PER_REQUEST + slot
        kept = logits[cu_num_logits[request] + slot].isfinite().numpy()
        kept_ids = np.flatnonzero(kept)
        counts[output_row] = len(kept_ids)
        first_ids = kept_ids[:max_num_kept]
        token_ids[output_row, : len(first_ids)] = first_ids
        packed_mask[output_row] = np.packbits(kept, bitorder="little")


def count_nans(
    logits: Tensor,  # [logits, V]
    num_nans: Tensor,  # [logits] int32
) -> None:
    """Count the NaNs of each row."""
    num_nans.copy_(logits.isnan().sum(dim=-1))


def topk_log_softmax(
    output: Tensor,  # [logits, k] float32
    logits: Tensor,  # [logits, V]
    topk_ids: Tensor,  # [logits, k] int64
) -> None:
    """Log-probabilities of the given tokens."""
    values = logits.float()
    shifted = values - values.amax(dim=-1, keepdim=True)
    log_sums = shifted.exp().sum(dim=-1, keepdim=True).log_()
    torch.sub(shifted.gather(-1, topk_ids), log_sums, out=output)


def compute_ranks(
    output: Tensor,  # [logits] int64
    logits: Tensor,  # [logits, V]
    token_ids: Tensor,  # [logits]
) -> None:
    """How many tokens are at least as likely as the given one, which counts itself."""
    chosen = logits.gather(1, token_ids[:, None].long())
    torch.sum(logits >= chosen, dim=1, out=output)


def fill_logprob_token_ids(
    out_token_ids: ndarray,  # [logits, 1 + columns] int64, zero
    out_valid_mask: ndarray,  # [logits, 1 + columns] bool, false
    sampled_token_ids: ndarray,  # [logits]
    topk_indices: ndarray,  # [logits, NUM_TOPK]; not read if NUM_TOPK is 0
    expanded_idx_mapping: ndarray,  # [logits or more] request rows
    num_per_req_token_ids: ndarray,  # [request rows]
    per_req_token_ids: ndarray,  # [request rows, most of them]
    NUM_TOPK: int,
) -> None:
    """List the tokens of log-probabilities: the sampled one, then those the request
    names or the best.
    """
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    for place in range(len(out_token_ids)):
        row = expanded_idx_mapping[place]
        number = num_per_req_token_ids[row]
        if number:
            listed = per_req_token_ids[row, :number]
        elif NUM_TOPK:
            listed = topk_indices[place, :NUM_TOPK]
        else:
            continue
        columns = slice(1, 1 + len(listed))
        out_token_ids[place, columns] = listed
        out_valid_mask[place, columns] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: ndarray,  # [tokens] int64
    query_start_loc: ndarray,  # [requests + 1 or more]
    idx_mapping: ndarray,  # [requests] request rows
    num_computed_tokens: ndarray,  # [request rows]
    all_token_ids: ndarray,  # [request rows, max_model_len]
) -> None:
    """The token that follows each token of a step."""
    query_lens = lengths_between(query_start_loc, idx_mapping)
    rows = idx_mapping.repeat(query_lens)
    following = num_computed_tokens[idx_mapping] + 1
    columns = counted_from(following, query_start_loc, query_lens)
    # Nothing follows the last token of a full row; vLLM reads on there, and drops what
    # it finds.
    columns = np.minimum(columns, all_token_ids.shape[1] - 1)
    prompt_logprobs_token_ids[: len(rows)] = all_token_ids[rows, columns]


def apply_grammar_bitmask(
    logits: Tensor,  # [logits, V], changed in place
    # [masks] request x MASK_STRIDE + index among its rows of logits
    logits_indices: ndarray,
    cu_num_logits: ndarray,  # [requests + 1]
    bitmask: ndarray,  # [masks, V / 32] int32, a bit a token that the grammar allows
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Drop the tokens that a grammar does not allow.

    A mask for a row that the step does not have is left out.
    """
    for mask, place in zip(bitmask, logits_indices, strict=False):
        request, local = divmod(place, MASK_STRIDE)
        row = cu_num_logits[request] + local
        if row < cu_num_logits[request + 1]:
            forbidden = torch.from_numpy(~unpacked(mask, vocab_size))
            logits[row, :vocab_size].masked_fill_(forbidden, float("-inf"))


def apply_temperature(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    temperature: ndarray,  # [request rows]
) -> None:
    """Divide rows of logits by their temperature, unless it is 0."""
    values = temperature[expanded_idx_mapping]
    logits /= np.where(values == 0.0, 1.0, values)[:, None]


def gumbel_sample(
    local_argmax: ndarray,  # [logits, blocks] int64, of each block of the vocabulary
    local_max: ndarray,  # [logits, blocks]
    logits: Tensor,  # [logits, V]
    expanded_idx_mapping: ndarray,  # [logits] request rows, -1: padding
    seeds: ndarray,  # [request rows] int64
    pos: ndarray,  # [logits]
    temp: ndarray,  # [request rows]
    USE_FP64: bool,
) -> None:
    """Draw a token of each row: by the greatest logit at temperature 0, else by the
    greatest sum. Temperatures are applied before, as only vLLM's own drafters ask for it
    here, which do not run on this runner.

    The drawn token is written as the first block's. The other blocks lose against it.
    """
    temperatures = temp[expanded_idx_mapping]
    all_values = logits.float().numpy()
    local_max[:, 0] = 0.0
    local_max[:, 1:] = -np.inf
    drawn = local_argmax[:, 0]
    drawn[:] = all_values.argmax(axis=-1)
    noise = noise_64 if USE_FP64 else noise_32
    noise_range = RANGE_53 if USE_FP64 else RANGE_32
    for row in np.flatnonzero(temperatures):
        if expanded_idx_mapping[row] < 0:
            continue
        values = all_values[row]
        best = int(drawn[row])
        if not np.isfinite(values[best]):
            continue
        within_range = values >= values[best] - noise_range
        seed = int(seeds[expanded_idx_mapping[row]])
        position = int(pos[row])
        if np.count_nonzero(within_range) > MANY and not USE_FP64:
            candidates = contenders(values, best, seed, position)
        else:
            candidates = np.flatnonzero(within_range)
        sums = values[candidates] + noise(seed, position, candidates, len(values))
        drawn[row] = candidates[sums.argmax()]


def contenders(
    values: ndarray,  # [V] float32
    best: int,
    seed: int,
    position: int,
) -> ndarray:
    """The tokens whose sums with noise in float32 may be the greatest: [tokens].

    The noise is -log(-log(1 - u)) <= -log(u), so a sum reaches s only if u <= exp(logit
    - s). The limit of the best token leaves out most at once.
    """
    vocab_size = len(values)
    some = np.append(np.arange(0, vocab_size, FIRST_STEP), best)
    reached = (values[some] + noise_32(seed, position, some, vocab_size)).max()
    bits = hashes(seed, position, slice(None), vocab_size)
    highest = math.exp(min(values[best] - reached + 2 * SLACK, 0)) * WORD
    possible = np.flatnonzero(bits <= np.uint32(highest))
    limits = np.exp(values[possible] - (reached - np.float32(SLACK)))
    return possible[bits[possible].astype(np.float32) <= limits * 2.0**32]


def noise_32(
    seed: int, position: int, token_ids: ndarray | slice, vocab_size: int
) -> ndarray:
    """Gumbel noise in float32 from 32 random bits a token, as vLLM's kernel rounds it."""
    bits = hashes(seed, position, token_ids, vocab_size)
    upper = (bits >> 16).astype(np.float32)
    lower = (bits & 0xFFFF).astype(np.float32)
    uniform = upper * 2.0**-16 + (lower + 0.5) * 2.0**-32
    return -np.log(-log_of_complement(uniform))


def noise_64(
    seed: int, position: int, token_ids: ndarray | slice, vocab_size: int
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
    seed: int,
    position: int,
    token_ids: ndarray | slice,
    vocab_size: int,
    start: int = 0,
) -> ndarray:
    """MurmurHash3 of (seed, position, token): [tokens] uint32.

    The hash mixes one 32-bit word after the other into its state. The last is the
    token's.
    """
    state = start
    for word in (seed, seed >> 32, position):
        state = mixed(state, word & WORD)
    hashed = token_words(vocab_size)[token_ids] ^ state
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
