# SPDX-License-Identifier: Apache-2.0
"""Sampling that all drafters share, in one launch each, without a sort.

keys    values and columns packed into integers, so that one maximum finds the best
        value and its lowest column; the order is torch's: -inf < ... < -0 = 0 < ... <
        inf < NaN
draw    a program per row, which is read twice: for the peak, and for an exponential
        race of the entries that reach the least weight
accept  drafts that equal the tokens drawn at their positions
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ppd.kernels import sampling as reference
from vllm_ppd.kernels.sampling import Sampling

NOTHING = tl.constexpr(-(1 << 63))  # below every key
INF = tl.constexpr(float("inf"))


@triton.jit
def pack(values, columns):
    """float32 values and their int32 columns (0 <= column < 2^31) as int64 keys."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def columns_of(keys):
    """The columns of keys, int64."""
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def values_of(keys):
    """The values of keys, float32."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(
        tl.float32, bitcast=True
    )


BLOCK = tl.constexpr(2048)  # entries at a time
COLDEST = tl.constexpr(reference.GREEDY_BELOW)
INVALID = tl.constexpr(reference.INVALID)
WORD_1 = tl.constexpr(reference.MULTIPLIERS[0])
WORD_2 = tl.constexpr(reference.MULTIPLIERS[1])
STEP_1 = tl.constexpr(reference.STEP[0])
STEP_2 = tl.constexpr(reference.STEP[1])
FINAL_1 = tl.constexpr(reference.FINAL[0])
FINAL_2 = tl.constexpr(reference.FINAL[1])
BYTES = tl.constexpr(reference.BYTES)


@triton.jit
def _mixed(state, word):
    word *= WORD_1
    word = ((word << 15) | (word >> 17)) * WORD_2
    state ^= word
    return ((state << 13) | (state >> 19)) * STEP_1 + STEP_2


@triton.jit
def exponential(seed, position, token_ids):
    """Same as the reference; exact in the lower tail, since the least of many variates
    wins a race.
    """
    state = _mixed((seed ^ seed).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed(state, token_ids.to(tl.uint32)) ^ BYTES
    state = (state ^ (state >> 16)) * FINAL_1
    state = (state ^ (state >> 13)) * FINAL_2
    state ^= state >> 16
    # Convert in halves, each of which is exact in float32.
    low = (state & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5
    uniform = (state >> 16).to(tl.int32).to(
        tl.float32
    ) * 1.52587890625e-05 + low * 2.3283064365386963e-10
    exact = -tl.log(tl.maximum(1 - uniform, 5.960464477539063e-08))
    return tl.where(
        uniform < 0.0078125, uniform * (1 + uniform * (0.5 + uniform / 3)), exact
    )


@triton.jit
def _logits(
    line,
    start,
    entries,
):
    """(Columns of a row from `start` on, their logits in float32: -inf past its end)."""
    column = start + tl.arange(0, BLOCK)
    logits = tl.load(line + column, mask=column < entries, other=-INF)
    return column, logits.to(tl.float32)


@triton.jit(do_not_specialize=["number"])
def _draw(
    logits,  # [rows, entries]
    row_stride,
    sampling: Sampling,
    token_ids,  # [entries] or [rows, entries], or None
    ids_stride,  # from row to row
    tokens,  # [rows, draws] int64
    token_stride,
    entries,
    number,  # index of this draw
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    heat = tl.load(sampling.temperature + row)
    cold = heat < COLDEST
    heat = tl.where(cold, 1.0, heat)
    best = tl.full((BLOCK,), NOTHING, tl.int64)
    for start in range(0, entries, BLOCK):
        column, logit = _logits(line, start, entries)
        keys = tl.where(column < entries, pack(logit, column), NOTHING)
        best = tl.maximum(best, keys)
    token = columns_of(tl.max(best, axis=0))
    peak = tl.load(line + token).to(tl.float32)
    finite = tl.abs(peak) < INF
    within_k = 1 / tl.load(sampling.top_k + row).to(tl.float32)
    least = tl.maximum(1 - tl.load(sampling.top_p + row), within_k)
    seed = tl.load(sampling.seeds + row)
    position = tl.load(sampling.positions + row) + number
    race = tl.full((BLOCK,), NOTHING, tl.int64)
    for start in range(0, entries, BLOCK):
        column, logit = _logits(line, start, entries)
        inside = column < entries
        score = (logit - peak) / heat
        outside = tl.exp(score) < least
        ids = column.to(tl.int64)
        if token_ids is not None:
            ids = tl.load(
                token_ids + row * ids_stride + column, mask=inside, other=0
            )
        # In log space: weights underflow float32 at low temperatures.
        score = score - tl.log(exponential(seed, position, ids))
        # NaN is not outside.
        runs = inside & (outside == 0)
        race = tl.maximum(race, tl.where(runs, pack(score, column), NOTHING))
    drawn = columns_of(tl.max(race, axis=0))
    token = tl.where(cold, token, drawn)
    tl.store(
        tokens + row * token_stride + number, tl.where(finite, token, INVALID)
    )


def draw_rows(
    logits: Tensor,
    sampling: Sampling,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Same as the reference; ties give the lowest entry, rows with NaN give INVALID."""
    tokens = torch.empty(len(logits), 1, dtype=torch.int64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    draw_next(logits, sampling, 0, tokens, token_ids)
    return tokens.squeeze(1)


def draw_next(
    logits: Tensor,  # [rows, entries], each row contiguous
    sampling: Sampling,  # at the positions of the first draw
    number: int,  # index of this draw
    tokens: Tensor,  # [rows, draws] int64, output
    token_ids: Tensor | None,  # as in draw_rows
) -> None:
    """Make one of several draws from each row; see draw_rows."""
    ids_stride = 0
    if token_ids is not None and token_ids.dim() == 2:
        ids_stride = token_ids.stride(0)
    _draw[(len(logits),)](
        logits,
        logits.stride(0),
        sampling,
        token_ids,
        ids_stride,
        tokens,
        tokens.stride(0),
        logits.shape[1],
        number,
        num_warps=8,
    )


@triton.jit
def _accept(
    drawn,
    drafts,
    starts,
    tokens,
    counts,
    width,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    place = tl.arange(0, BLOCK)
    here = place < end - start
    follows = place + 1 < end - start
    token = tl.load(drawn + start + place, mask=here, other=0)
    draft = tl.load(drafts + start + place + 1, mask=follows, other=-1)
    tl.store(tokens + request * width + place, token, mask=place < width)
    accepted = tl.min(tl.where(follows & (token == draft), BLOCK, place), axis=0)
    tl.store(counts + request, accepted + 1)


def accept_drawn(
    drawn: Tensor, drafts: Tensor, starts: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Same as the reference; tokens past a request's last row of logits are 0."""
    requests = len(starts) - 1
    tokens = drafts.new_empty(requests, width)
    counts = torch.empty(requests, dtype=torch.int32, device=drawn.device)
    _accept[(requests,)](
        drawn,
        drafts,
        starts,
        tokens,
        counts,
        width,
        BLOCK=triton.next_power_of_2(width),
    )
    return tokens, counts
