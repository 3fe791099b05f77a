# SPDX-License-Identifier: Apache-2.0
"""The chain of CP drafts in two passes over the logits, with one launch where torch
needs a dozen.

    softmax  once: parts of the log-sum-exp of every row, position and expert
    sum_up   once: that log-sum-exp
    mix      per position: the mixture over experts and its best entry; where rows
             sample, the mixture's logarithm
    draw     per position, where rows sample (sampling_triton.py)
    advance  per position, a program per row: the winner, each expert's probability of
             it, the posterior (eq. 11 to 13)

The library's matrix product computes the logits (every expert and position is a row, so
E* is read once).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ppd.kernels.sampling import INVALID as NO_TOKEN
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.sampling_triton import (
    INF,
    NOTHING,
    columns_of,
    draw_next,
    pack,
    values_of,
)

BLOCK_V = 2048  # vocabulary entries per program
INVALID = tl.constexpr(NO_TOKEN)


@triton.jit
def _softmax(
    logits,
    maxima,  # [rows * n * r, parts] float32
    sums,  # [rows * n * r, parts] float32
    vocab,
    step,  # elements from line to line, at least vocab
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    values = tl.load(logits + line * step + column, mask=inside, other=-INF)
    values = values.to(tl.float32)
    peak = tl.max(values, axis=0)
    shift = tl.where(tl.abs(peak) == INF, 0.0, peak)
    at = line * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima + at, shift)
    tl.store(sums + at, tl.sum(tl.exp(values - shift), axis=0))


@triton.jit
def _sum_up(
    maxima,
    sums,
    logsumexp,
    parts,
    PARTS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    largest = tl.load(maxima + line * parts + part, mask=part < parts, other=-INF)
    total = tl.load(sums + line * parts + part, mask=part < parts, other=0.0)
    # A part with only -inf has shift 0 and sum 0; NaN stays NaN.
    peak = tl.max(tl.where(total == 0, -INF, largest), axis=0)
    shift = tl.where(peak == -INF, 0.0, peak)
    scaled = tl.where(total == 0, 0.0, total * tl.exp(largest - shift))
    tl.store(logsumexp + line, tl.log(tl.sum(scaled, axis=0)) + shift)


@triton.jit(do_not_specialize=["position"])
def _mix(
    logits,  # [rows, n, r, vocab]
    logsumexp,  # [rows, n, r] float32
    log_weights,  # [rows, r] float32
    # [rows, vocab] float32, where rows sample: the logarithm of the mixture
    mixed,
    best,  # [rows, parts] int64, the key of each part's best entry
    position,
    positions,
    rank,
    vocab,
    step,
    DRAWN: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    mixture = tl.zeros((BLOCK,), tl.float32)
    for expert in tl.static_range(R):
        line = (row * positions + position) * rank + expert
        values = tl.load(logits + line * step + column, mask=inside, other=-INF)
        log_factors = values.to(tl.float32) - tl.load(logsumexp + line)
        weight = tl.exp(tl.load(log_weights + row * rank + expert))
        mixture += weight * tl.exp(log_factors)
    if DRAWN:
        tl.store(mixed + row * vocab + column, tl.log(mixture), mask=inside)
    else:
        keys = tl.where(inside, pack(mixture, column), NOTHING)
        at = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(best + at, tl.max(keys, axis=0))


@triton.jit(do_not_specialize=["position"])
def _advance(
    logits,
    logsumexp,
    log_weights,
    best,
    first_token,
    tokens,  # [rows, drafts] int64
    position,
    positions,
    drafts,  # number of drafts, which are the last positions
    rank,
    step,
    parts,
    FIRST: tl.constexpr,
    DRAWN: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, R)
    real = expert < rank
    draft = row * drafts + position - positions + drafts
    if FIRST:
        token = tl.load(first_token + row)
    elif DRAWN:
        token = tl.load(tokens + draft)
    else:
        part = tl.arange(0, PARTS)
        keys = tl.load(
            best + row * parts + part, mask=part < parts, other=NOTHING
        )
        key = tl.max(keys, axis=0)
        finite = tl.abs(values_of(key)) < INF
        token = tl.where(finite, columns_of(key), INVALID)
        tl.store(tokens + draft, token)
    line = (row * positions + position) * rank + expert
    known = tl.where(token < 0, 0, token)
    value = tl.load(logits + line * step + known, mask=real, other=0.0)
    seen = value.to(tl.float32) - tl.load(logsumexp + line, mask=real, other=0.0)
    if FIRST:
        seen = tl.where(token < 0, 0.0, seen)
    prior = tl.load(log_weights + row * rank + expert, mask=real, other=-INF)
    updated = tl.where(real, prior + seen, -INF)
    # A token that every expert rules out says nothing about them.
    said = tl.max((updated != -INF).to(tl.int32), axis=0)
    updated = tl.where(said == 1, updated, prior)
    shifted = updated - tl.max(updated, axis=0)
    total = tl.sum(tl.where(real, tl.exp(shifted), 0.0), axis=0)
    shifted -= tl.log(total)
    tl.store(log_weights + row * rank + expert, shifted, mask=real)


@torch.no_grad()
def draft_chain(
    log_weights: Tensor,
    logits: Tensor,
    first_token: Tensor | None,
    sampling: Sampling | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, in float32. Ties give the lowest id."""
    lead = 0 if first_token is None else 1
    rows, positions, rank, vocab = logits.shape
    device = logits.device
    drafts = positions - lead
    parts = triton.cdiv(vocab, BLOCK_V)
    # Evenly spaced lines are read in place: an LM head pads its vocabulary.
    step = logits.stride(2) if rank > 1 else logits.stride(1)
    if logits.stride() != (positions * rank * step, rank * step, step, 1):
        logits = logits.contiguous()
        step = vocab
    weights = log_weights.float().clone().contiguous()
    padded = triton.next_power_of_2(parts)
    lines = rows * positions * rank
    # Two tensors: the alignment of the halves of one, and so the compiled code, would
    # depend on the number of rows.
    maxima = torch.empty(lines, parts, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    _softmax[(lines, parts)](logits, maxima, sums, vocab, step, BLOCK=BLOCK_V)
    logsumexp = torch.empty(lines, dtype=torch.float32, device=device)
    _sum_up[(lines,)](maxima, sums, logsumexp, parts, PARTS=padded)
    tokens = torch.empty(rows, drafts, dtype=torch.int64, device=device)
    best = torch.empty(rows, parts, dtype=torch.int64, device=device)
    first = tokens if first_token is None else first_token.contiguous()
    mixed = best
    if sampling is not None:
        mixed = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    shape = {"rank": rank, "positions": positions, "step": step}
    for position in range(positions):
        if position >= lead:
            _mix[(rows, parts)](
                logits,
                logsumexp,
                weights,
                mixed,
                best,
                position,
                **shape,
                vocab=vocab,
                DRAWN=sampling is not None,
                R=rank,
                BLOCK=BLOCK_V,
            )
            if sampling is not None:
                draw_next(mixed, sampling, position - lead, tokens, token_ids)
        _advance[(rows,)](
            logits,
            logsumexp,
            weights,
            best,
            first,
            tokens,
            position,
            **shape,
            drafts=drafts,
            parts=parts,
            FIRST=position < lead,
            DRAWN=sampling is not None,
            R=triton.next_power_of_2(rank),
            PARTS=padded,
        )
    return tokens, weights
