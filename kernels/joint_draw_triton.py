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

BLOCK, BLOCK_R = 1024, 16  # entries at a time, in all and per candidate
MOST_HEADS = 3
EDGE = math.exp(-1 / (2 * 0.8**2))  # the edge of a Gaussian of size 3 whose centre is 1


@triton.jit
def _kept(line: tl.tensor, entry: tl.tensor, inside: tl.tensor, total: tl.tensor, floor: tl.tensor) -> tl.tensor:
    share = tl.load(line + entry, mask=inside, other=0.0)
    share = tl.div_rn(share, tl.zeros_like(share) + total)
    return tl.where(share >= floor, share, 0.0)


@triton.jit
def _threshold(counts: tl.tensor, least: tl.tensor, width: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """Otsu's threshold of a histogram of 256 bins."""
    count, bins = counts.to(tl.float64), tl.arange(0, BINS)
    weighted = count * (bins.to(tl.float64) + 0.5)
    below, mass = tl.cumsum(count, axis=0), tl.cumsum(weighted, axis=0)
    above, rest = tl.sum(count, axis=0) - below, tl.sum(weighted, axis=0) - mass
    gap = mass / tl.maximum(below, 1.0) - rest / tl.maximum(above, 1.0)
    variance = tl.where(bins < BINS - 1, below * above * gap * gap, -1.0)
    return least + width * (tl.argmax(variance, axis=0) + 1).to(tl.float32) / BINS


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
    total, floor = tl.maximum(tl.load(likeliest.total + row), TINY), tl.load(likeliest.floor + row)
    least = tl.full((), float("inf"), tl.float32)
    greatest = tl.full((), float("-inf"), tl.float32)
    peak, threshold = greatest, least
    if ADAPTIVE:  # noqa: SIM102 (only the first is known at compile time)
        if order > 1:
            planes, lines = tl.where(free > 2, K, 1), tl.where(free > 1, K, 1)
            for start in range(0, size, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                inside = entry < size
                a, b, c = entry // (K * lines), entry // K % lines, entry % K
                smooth = tl.zeros((BLOCK,), tl.float32)
                for i in tl.static_range(-BLUR, BLUR + 1):
                    column = tl.minimum(tl.maximum(c + i, 0), K - 1)
                    of_c = edge if i != 0 else centre
                    for j in tl.static_range(-BLUR * (HEADS > 1), BLUR * (HEADS > 1) + 1):
                        at = tl.minimum(tl.maximum(b + j, 0), lines - 1) * K + column
                        of_b = edge if j != 0 else centre if HEADS > 1 else 1.0
                        for k in tl.static_range(-BLUR * (HEADS > 2), BLUR * (HEADS > 2) + 1):
                            plane = tl.minimum(tl.maximum(a + k, 0), planes - 1)
                            of_a = edge if k != 0 else centre if HEADS > 2 else 1.0
                            value = _kept(line, plane * lines * K + at, inside, total, floor)
                            smooth += value * (of_a * of_b * of_c)
                tl.store(here + entry, smooth, mask=inside)
                least = tl.minimum(least, tl.min(tl.where(inside, smooth, float("inf")), axis=0))
                greatest = tl.maximum(greatest, tl.max(tl.where(inside, smooth, float("-inf")), axis=0))
                peak = tl.maximum(peak, tl.max(_kept(line, entry, inside, total, floor), axis=0))
            tl.debug_barrier()
            counts, width = tl.zeros((BINS,), tl.int32), tl.maximum(greatest - least, TINY)
            for start in range(0, size, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                inside = entry < size
                above = tl.where(inside, tl.load(here + entry, mask=inside, other=0.0) - least, 0.0)
                index = (tl.div_rn(above, tl.zeros((BLOCK,), tl.float32) + width) * BINS).to(tl.int32)
                counts += tl.histogram(tl.minimum(tl.maximum(index, 0), BINS - 1), BINS, mask=inside)
            threshold = tl.where(greatest > least, _threshold(counts, least, width, BINS), least)
            tl.debug_barrier()
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        kept = _kept(line, entry, inside, total, floor)
        survives = tl.load(here + entry, mask=inside, other=0.0) >= threshold
        tl.store(here + entry, tl.where(survives | (kept >= peak), kept, 0.0), mask=inside)
    tl.debug_barrier()
    cold = tl.load(sampling.temperature + row) < COLDEST
    column, prefix = tl.arange(0, K_BLOCK), tl.full((), 0, tl.int64)
    rest, number = size, HEADS + GIVEN
    for axis in tl.static_range(HEADS):
        rest = tl.where(axis < free, rest // K, 0)  # entries of each candidate; none past the order
        probs = tl.zeros((K_BLOCK,), tl.float32)
        for start in range(0, rest, BLOCK_R):
            after = start + tl.arange(0, BLOCK_R)
            inside = (column[:, None] < K) & (after[None, :] < rest)
            at = (prefix * K + column[:, None]) * rest + after[None, :]
            probs += tl.sum(tl.load(here + at, mask=inside, other=0.0), axis=1)
        valid = (tl.sum(probs, axis=0) > 0) & (axis < free)
        probs = probs / tl.maximum(tl.sum(probs, axis=0), TINY)
        if sampling.top_k is not None:
            larger = tl.sum((probs[None, :] > probs[:, None]).to(tl.float32), axis=1)
            probs = tl.where(larger < tl.load(sampling.top_k + row).to(tl.float32), probs, 0.0)
        if sampling.top_p is not None:
            up_to = tl.sum(tl.where(probs[None, :] <= probs[:, None], probs[None, :], 0.0), axis=1)
            outside = up_to <= (1 - tl.load(sampling.top_p + row)) * tl.sum(probs, axis=0)
            probs = tl.where(outside & (probs < tl.max(probs, axis=0)), 0.0, probs)
        probs = probs / tl.maximum(tl.sum(probs, axis=0), TINY)
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
    (heads, rows, k), given, device = top.ids.shape, int(top.first_token is not None), top.ids.device
    if heads > MOST_HEADS or (adaptive and blur not in (1, 3)):
        return joint_draw.draw_ngrams(joints, likeliest, top, blur, adaptive, sampling)
    scratch = torch.empty(rows, k**heads, dtype=torch.float32, device=device)
    tokens = torch.empty_like(likeliest.tokens)
    centre, edge = (1 / (1 + 2 * EDGE), EDGE / (1 + 2 * EDGE)) if blur == 3 else (1.0, 0.0)
    _draw_ngrams[(rows,)](
        tuple(joints), likeliest, top, with_seeds(sampling), scratch, tokens, centre, edge, rows,
        HEADS=heads, K=k, K_BLOCK=triton.next_power_of_2(k), GIVEN=given, BLUR=blur // 2, ADAPTIVE=adaptive,
        BINS=BINS, BLOCK=BLOCK, BLOCK_R=BLOCK_R, num_warps=8,
    )  # fmt: skip
    return tokens
