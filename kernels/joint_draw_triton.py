# SPDX-License-Identifier: Apache-2.0
"""Thresholds of DynaMo's joint and a draw from it in one launch, where torch needs about two hundred.

Each program handles one row, at its order only: floor and blur, Otsu's threshold from 256 counts, cut, token by token.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import joint_draw
from vllm_ppd.kernels.draws_triton import COLDEST, INVALID, exponential, with_seeds
from vllm_ppd.kernels.joint import Likeliest, Top
from vllm_ppd.kernels.joint_draw import BINS
from vllm_ppd.kernels.joint_triton import TINY
from vllm_ppd.kernels.ordered_keys import columns_of, pack
from vllm_ppd.kernels.sampling import Sampling

BLOCK = 1024  # entries at a time
BLOCK_R = 16  # entries at a time per candidate
MOST_HEADS = 3
EDGE = math.exp(-1 / (2 * 0.8**2))  # the edge of a Gaussian of size 3 whose centre is 1


@triton.jit
def _kept(line: tl.tensor, entry: tl.tensor, inside: tl.tensor, total: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Shares of a row's entries, 0 below the floor."""
    share = tl.load(line + entry, mask=inside, other=0.0)
    share = tl.div_rn(share, tl.zeros_like(share) + total)
    return tl.where(share >= floor, share, 0.0)


@triton.jit
def _near(place: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Places on an axis, those beyond an edge replaced by the edge."""
    return tl.minimum(tl.maximum(place, 0), size - 1)


@triton.jit
def _blurred(
    line: tl.tensor,
    entry: tl.tensor,
    inside: tl.tensor,
    total: tl.tensor,
    floor: tl.tensor,
    planes: tl.tensor,  # entries of the axes, of which the last has K
    lines: tl.tensor,
    centre: tl.tensor,
    edge: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLUR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A Gaussian blur of the kept entries over up to three axes."""
    plane = entry // (K * lines)
    row = entry // K % lines
    column = entry % K
    ROWS: tl.constexpr = BLUR if HEADS > 1 else 0
    PLANES: tl.constexpr = BLUR if HEADS > 2 else 0
    blurred = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(-BLUR, BLUR + 1):
        for j in tl.static_range(-ROWS, ROWS + 1):
            for k in tl.static_range(-PLANES, PLANES + 1):
                weight = edge if i != 0 else centre
                if HEADS > 1:
                    weight *= edge if j != 0 else centre
                if HEADS > 2:
                    weight *= edge if k != 0 else centre
                beside = (_near(plane + k, planes) * lines + _near(row + j, lines)) * K + _near(column + i, K)
                blurred += weight * _kept(line, beside, inside, total, floor)
    return blurred


@triton.jit
def _threshold(
    blurred: tl.tensor,  # where the row's blurred entries begin
    size: tl.tensor,
    least: tl.tensor,
    greatest: tl.tensor,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Otsu's threshold, from a histogram between the least and the greatest entry."""
    width = tl.maximum(greatest - least, TINY)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        above = tl.where(inside, tl.load(blurred + entry, mask=inside, other=0.0) - least, 0.0)
        index = (tl.div_rn(above, tl.zeros((BLOCK,), tl.float32) + width) * BINS).to(tl.int32)
        counts += tl.histogram(_near(index, BINS), BINS, mask=inside)
    count = counts.to(tl.float64)
    bins = tl.arange(0, BINS)
    weighted = count * (bins.to(tl.float64) + 0.5)
    below = tl.cumsum(count, axis=0)
    mass = tl.cumsum(weighted, axis=0)
    above_cut = tl.sum(count, axis=0) - below
    rest = tl.sum(weighted, axis=0) - mass
    gap = mass / tl.maximum(below, 1.0) - rest / tl.maximum(above_cut, 1.0)
    variance = tl.where(bins < BINS - 1, below * above_cut * gap * gap, -1.0)
    cut = least + width * (tl.argmax(variance, axis=0) + 1).to(tl.float32) / BINS
    return tl.where(greatest > least, cut, least)


@triton.jit
def _marginal(
    joint: tl.tensor,  # where the row's entries begin
    prefix: tl.tensor,  # the places drawn so far, as a number to the base K
    rest: tl.tensor,  # entries of each candidate
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """The sums of the entries of each candidate for the next token: [K_BLOCK]."""
    column = tl.arange(0, K_BLOCK)
    sums = tl.zeros((K_BLOCK,), tl.float32)
    for start in range(0, rest, BLOCK_R):
        after = start + tl.arange(0, BLOCK_R)
        inside = (column[:, None] < K) & (after[None, :] < rest)
        at = (prefix * K + column[:, None]) * rest + after[None, :]
        sums += tl.sum(tl.load(joint + at, mask=inside, other=0.0), axis=1)
    return sums


@triton.jit
def _limited(probs: tl.tensor, sampling: Sampling, row: tl.tensor) -> tl.tensor:
    """A distribution cut to a row's top-k and top-p: [K_BLOCK]."""
    if sampling.top_k is not None:
        larger = tl.sum((probs[None, :] > probs[:, None]).to(tl.float32), axis=1)
        probs = tl.where(larger < tl.load(sampling.top_k + row).to(tl.float32), probs, 0.0)
    if sampling.top_p is not None:
        up_to = tl.sum(tl.where(probs[None, :] <= probs[:, None], probs[None, :], 0.0), axis=1)
        outside = up_to <= (1 - tl.load(sampling.top_p + row)) * tl.sum(probs, axis=0)
        probs = tl.where(outside & (probs < tl.max(probs, axis=0)), 0.0, probs)
    return probs / tl.maximum(tl.sum(probs, axis=0), TINY)


@triton.jit(do_not_specialize=["rows"])
def _draw_ngrams(
    joints: tl.tuple,
    likeliest: Likeliest,
    top: Top,
    sampling: Sampling,
    scratch: tl.tensor,  # [rows, entries of the highest order] float32
    tokens: tl.tensor,
    centre: tl.tensor,
    edge: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,  # 1 with a first token, else 0
    BLUR: tl.constexpr,  # entries on either side
    ADAPTIVE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    order = tl.load(likeliest.order + row)
    free = order - GIVEN  # axes of more than one entry
    size = tl.full((), 1, tl.int64)
    for axis in tl.static_range(HEADS):
        size = tl.where(axis < free, size * K, size)
    line = joints[0]
    for below in tl.static_range(1, len(joints)):
        line = tl.where(order == below + 1, joints[below], line)
    line += row * size
    here = scratch + row * K**HEADS
    total = tl.maximum(tl.load(likeliest.total + row), TINY)
    floor = tl.load(likeliest.floor + row)

    # Thresholds, of which the adaptive one reads the blurred entries in the scratch memory.
    least = tl.full((), float("inf"), tl.float32)
    greatest = tl.full((), float("-inf"), tl.float32)
    peak = greatest
    threshold = least
    if ADAPTIVE:  # noqa: SIM102 (only the first is known at compile time)
        if order > 1:
            planes = tl.where(free > 2, K, 1)
            lines = tl.where(free > 1, K, 1)
            for start in range(0, size, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                inside = entry < size
                smooth = _blurred(line, entry, inside, total, floor, planes, lines, centre, edge, HEADS, K, BLUR, BLOCK)
                tl.store(here + entry, smooth, mask=inside)
                least = tl.minimum(least, tl.min(tl.where(inside, smooth, float("inf")), axis=0))
                greatest = tl.maximum(greatest, tl.max(tl.where(inside, smooth, float("-inf")), axis=0))
                peak = tl.maximum(peak, tl.max(_kept(line, entry, inside, total, floor), axis=0))
            tl.debug_barrier()
            threshold = _threshold(here, size, least, greatest, BINS, BLOCK)
            tl.debug_barrier()
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        kept = _kept(line, entry, inside, total, floor)
        survives = tl.load(here + entry, mask=inside, other=0.0) >= threshold
        tl.store(here + entry, tl.where(survives | (kept >= peak), kept, 0.0), mask=inside)
    tl.debug_barrier()

    # A draw, token by token.
    cold = tl.load(sampling.temperature + row) < COLDEST
    column = tl.arange(0, K_BLOCK)
    prefix = tl.full((), 0, tl.int64)
    rest = size
    number = HEADS + GIVEN
    for axis in tl.static_range(HEADS):
        rest = tl.where(axis < free, rest // K, 0)  # none past the order
        probs = _marginal(here, prefix, rest, K, K_BLOCK, BLOCK_R)
        mass = tl.sum(probs, axis=0)
        valid = (mass > 0) & (axis < free)
        probs = _limited(probs / tl.maximum(mass, TINY), sampling, row)
        # In log space, where an entry of probability 0 never wins over another.
        ids = tl.load(top.ids + (axis * rows + row) * K + column, mask=column < K, other=0)
        position = tl.load(sampling.positions + row) + axis
        score = tl.log(probs) - tl.log(exponential(tl.load(sampling.seeds + row), position, ids))
        place = columns_of(tl.max(pack(score, column), axis=0))
        place = tl.where(cold, tl.load(likeliest.places + row * number + GIVEN + axis), place)
        token = tl.load(top.ids + (axis * rows + row) * K + place)
        tl.store(tokens + row * number + GIVEN + axis, tl.where(valid, token, INVALID))
        prefix = prefix * K + place
    if GIVEN:
        tl.store(tokens + row * number, tl.load(top.first_token + row))


def draw_ngrams(
    joints: Sequence[torch.Tensor],
    likeliest: Likeliest,
    top: Top,
    blur: int,
    adaptive: bool,
    sampling: Sampling,
) -> torch.Tensor:
    """Same as the reference, which runs for blurs other than 1 and 3 and for more than three heads."""
    heads, rows, k = top.ids.shape
    if heads > MOST_HEADS or (adaptive and blur not in (1, 3)):
        return joint_draw.draw_ngrams(joints, likeliest, top, blur, adaptive, sampling)
    centre = 1 / (1 + 2 * EDGE) if blur == 3 else 1.0
    tokens = torch.empty_like(likeliest.tokens)
    _draw_ngrams[(rows,)](
        tuple(joints),
        likeliest,
        top,
        with_seeds(sampling),
        torch.empty(rows, k**heads, dtype=torch.float32, device=tokens.device),
        tokens,
        centre,
        EDGE * centre,
        rows,
        HEADS=heads,
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        GIVEN=int(top.first_token is not None),
        BLUR=blur // 2,
        ADAPTIVE=adaptive,
        BINS=BINS,
        BLOCK=BLOCK,
        BLOCK_R=BLOCK_R,
        num_warps=8,
    )
    return tokens
