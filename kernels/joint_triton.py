# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint and the n-grams to draft, in three launches where torch needs about
two hundred and sixty.

find peaks  a program per row, order and part of the joint's entries: product, mask by
            binary search, sum and maximum
back off    a program per row: the merged parts, the order, and its tokens
draw        a program per row, at its order only: floor and blur, Otsu's threshold, cut,
            token by token
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import joint
from vllm_ppd.kernels.joint import BINS, Likeliest, Ngrams, Peaks, Top
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.sampling_triton import (
    COLDEST,
    INVALID,
    NOTHING,
    columns_of,
    exponential,
    pack,
    values_of,
    with_seeds,
)

BLOCK = 1024  # entries of a program at a time
TINY = tl.constexpr(joint.TINY)


@triton.jit
def _digits(ngrams: Ngrams | None, token_ids: tl.tensor) -> tl.tensor:
    """See Ngrams.digits."""
    digits = token_ids
    if ngrams is not None:  # noqa: SIM102 (only known at compile time)
        if ngrams.columns is not None:
            last = tl.zeros_like(token_ids) + ngrams.vocab_size - 1
            digits = tl.load(
                ngrams.columns + tl.minimum(tl.maximum(token_ids, 0), last)
            )
    return digits


@triton.jit(do_not_specialize=["rows", "steps"])
def _find_peaks(
    top: Top,
    ngrams: Ngrams | None,
    peaks: Peaks,
    joints: tl.tuple,  # one per order, or none
    rows: tl.tensor,
    steps: tl.tensor,  # number of steps of the binary search
    HEADS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,  # 1 with a first token, else 0
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    order = tl.program_id(2) + 1
    free = order - GIVEN  # axes of more than one entry
    size = tl.full((), 1, tl.int64)
    for axis in tl.static_range(HEADS):
        size = tl.where(axis < free, size * K, size)
    at = ((order - 1) * rows + row) * tl.num_programs(1) + part
    if part * BLOCK >= size:
        tl.store(peaks.sums + at, 0.0)
        tl.store(peaks.entries + at, float("-inf"))
        tl.store(peaks.places + at, 0)
        return
    entry = part * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    product = tl.full((BLOCK,), 1.0, tl.float32)
    # The n-gram's key, built from the last token to the first
    wanted = tl.zeros((BLOCK,), tl.int64)
    weight = tl.full((), 1, tl.int64)
    rest = entry
    column = tl.arange(0, K_BLOCK)
    for behind in tl.static_range(HEADS):
        axis = HEADS - 1 - behind
        if axis < free:
            line = (axis * rows + row) * K
            scores = tl.load(
                top.scores + line + column, mask=column < K, other=float("-inf")
            )
            peak = tl.max(scores, axis=0)
            share = tl.exp(tl.load(top.scores + line + rest % K) - peak)
            product *= tl.div_rn(
                share,
                tl.zeros((BLOCK,), tl.float32) + tl.sum(tl.exp(scores - peak), axis=0),
            )
            wanted += _digits(ngrams, tl.load(top.ids + line + rest % K)) * weight
            weight *= 1 if ngrams is None else ngrams.base
            rest = rest // K
    if ngrams is not None:  # noqa: SIM102 (only the first is known at compile time)
        if order > 1:
            if GIVEN:
                wanted += _digits(ngrams, tl.load(top.first_token + row)) * weight
            low = tl.zeros((BLOCK,), tl.int64) + tl.load(ngrams.starts + order - 2)
            # The sentinel
            high = tl.zeros((BLOCK,), tl.int64) + tl.load(ngrams.starts + order - 1) - 1
            for _ in range(steps):
                middle = (low + high) // 2
                less = tl.load(ngrams.keys + middle) < wanted
                low = tl.where(less, middle + 1, low)
                high = tl.where(less, high, middle)
            ratio = tl.load(ngrams.ratios + low)
            if ALPHA != 1:
                ratio = tl.exp2(ALPHA * tl.log2(ratio))
            product *= tl.where(tl.load(ngrams.keys + low) == wanted, ratio, 0.0)
    best = tl.max(tl.where(inside, pack(product, entry), NOTHING), axis=0)
    tl.store(peaks.sums + at, tl.sum(tl.where(inside, product, 0.0), axis=0))
    tl.store(peaks.entries + at, values_of(best))
    tl.store(peaks.places + at, columns_of(best))
    for below in tl.static_range(len(joints)):
        if below + 1 == order:
            tl.store(joints[below] + row * size + entry, product, mask=inside)


@triton.jit(do_not_specialize=["rows", "default"])
def _back_off(
    peaks: Peaks,
    top: Top,
    eps_b: tl.tensor,
    likeliest: Likeliest,
    rows: tl.tensor,
    parts: tl.tensor,
    default: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    GIVEN: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    eps = tl.load(eps_b + row)
    eps = tl.where(eps == eps, eps, default)
    finite = tl.full((), 1, tl.int1)
    for below in tl.static_range(HEADS + GIVEN):
        at = (below * rows + row) * parts + part
        finite = finite & (
            tl.abs(
                tl.sum(tl.load(peaks.sums + at, mask=part < parts, other=0.0), axis=0)
            )
            < float("inf")
        )
    order = tl.full((), 1, tl.int64)
    entry = tl.full((), 0, tl.int64)
    power = tl.full((), 1.0, tl.float32)
    floor = tl.full((), 0.0, tl.float32)
    total = floor
    for below in tl.static_range(HEADS + GIVEN):
        at = (below * rows + row) * parts + part
        mass = tl.sum(tl.load(peaks.sums + at, mask=part < parts, other=0.0), axis=0)
        value = tl.load(peaks.entries + at, mask=part < parts, other=float("-inf"))
        packed = pack(
            value, tl.load(peaks.places + at, mask=part < parts, other=0).to(tl.int32)
        )
        best = tl.max(tl.where(part < parts, packed, NOTHING), axis=0)
        if below == 0:
            entry = columns_of(best)
            total = mass
        else:
            power *= eps
            taken = finite & (
                tl.div_rn(values_of(best), tl.maximum(mass, TINY)) > power
            )
            order = tl.where(taken, below + 1, order)
            entry = tl.where(taken, columns_of(best), entry)
            floor = tl.where(taken, power, floor)
            total = tl.where(taken, mass, total)
    tl.store(likeliest.order + row, order)
    tl.store(likeliest.drafts + row, tl.where(finite, order - 1, 1))
    tl.store(likeliest.floor + row, floor)
    tl.store(likeliest.total + row, total)
    line = row * (HEADS + GIVEN)
    if GIVEN:
        tl.store(likeliest.tokens + line, tl.load(top.first_token + row))
        tl.store(likeliest.places + line, 0)
    for behind in tl.static_range(HEADS):
        axis = HEADS - 1 - behind
        taken = axis < order - GIVEN
        place = tl.where(taken, entry % K, 0)
        entry = tl.where(taken, entry // K, entry)
        token = tl.load(top.ids + (axis * rows + row) * K + place)
        tl.store(likeliest.tokens + line + GIVEN + axis, tl.where(taken, token, -1))
        tl.store(likeliest.places + line + GIVEN + axis, place)


def find_peaks(
    top: Top, ngrams: Ngrams | None, alpha_c: float, with_joints: bool = True
) -> tuple[Peaks, list[torch.Tensor]]:
    """Same as the reference, but with several parts per row."""
    (heads, rows, k), given, device = (
        top.ids.shape,
        int(top.first_token is not None),
        top.ids.device,
    )
    orders = heads + given
    parts = triton.cdiv(k**heads, BLOCK)
    types = (torch.float32, torch.float32, torch.int64)
    peaks = Peaks(
        *(
            torch.empty(orders, rows, parts, dtype=dtype, device=device)
            for dtype in types
        )
    )
    shapes = [
        [rows, *[1] * given, *[k] * (order - given)] for order in range(1, orders + 1)
    ]
    joints = tuple(
        torch.empty(shape, dtype=torch.float32, device=device)
        for shape in shapes
        if with_joints
    )
    steps = 0 if ngrams is None else ngrams.bounds[-1].bit_length()
    _find_peaks[(rows, parts, orders)](
        top,
        ngrams,
        peaks,
        joints,
        rows,
        steps,
        HEADS=heads,
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        GIVEN=given,
        ALPHA=alpha_c,
        BLOCK=BLOCK,
    )
    return peaks, list(joints)


def back_off(peaks: Peaks, top: Top, eps_b: torch.Tensor, default: float) -> Likeliest:
    """Same as the reference."""
    (heads, rows, k), given, parts = (
        top.ids.shape,
        int(top.first_token is not None),
        peaks.sums.shape[2],
    )
    integers = (
        torch.empty(rows, *n, dtype=torch.int64, device=eps_b.device)
        for n in ((), (), *[(heads + given,)] * 2)
    )
    likeliest = Likeliest(
        *integers,
        *(
            torch.empty(rows, dtype=torch.float32, device=eps_b.device)
            for _ in range(2)
        ),
    )
    _back_off[(rows,)](
        peaks,
        top,
        eps_b,
        likeliest,
        rows,
        parts,
        default,
        HEADS=heads,
        K=k,
        GIVEN=given,
        PARTS=triton.next_power_of_2(parts),
    )
    return likeliest


BLOCK_R = 16  # entries at a time per candidate
MOST_HEADS = 3
EDGE = math.exp(-1 / (2 * 0.8**2))  # the edge of a Gaussian of size 3 whose centre is 1


@triton.jit
def _kept(
    line: tl.tensor,
    entry: tl.tensor,
    inside: tl.tensor,
    total: tl.tensor,
    floor: tl.tensor,
) -> tl.tensor:
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
                beside = (
                    _near(plane + k, planes) * lines + _near(row + j, lines)
                ) * K + _near(column + i, K)
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
        above = tl.where(
            inside, tl.load(blurred + entry, mask=inside, other=0.0) - least, 0.0
        )
        index = (tl.div_rn(above, tl.zeros((BLOCK,), tl.float32) + width) * BINS).to(
            tl.int32
        )
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
        probs = tl.where(
            larger < tl.load(sampling.top_k + row).to(tl.float32), probs, 0.0
        )
    if sampling.top_p is not None:
        up_to = tl.sum(
            tl.where(probs[None, :] <= probs[:, None], probs[None, :], 0.0), axis=1
        )
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

    # Thresholds, of which the adaptive one reads the blurred entries in the scratch
    # memory.
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
                smooth = _blurred(
                    line,
                    entry,
                    inside,
                    total,
                    floor,
                    planes,
                    lines,
                    centre,
                    edge,
                    HEADS,
                    K,
                    BLUR,
                    BLOCK,
                )
                tl.store(here + entry, smooth, mask=inside)
                least = tl.minimum(
                    least, tl.min(tl.where(inside, smooth, float("inf")), axis=0)
                )
                greatest = tl.maximum(
                    greatest, tl.max(tl.where(inside, smooth, float("-inf")), axis=0)
                )
                peak = tl.maximum(
                    peak, tl.max(_kept(line, entry, inside, total, floor), axis=0)
                )
            tl.debug_barrier()
            threshold = _threshold(here, size, least, greatest, BINS, BLOCK)
            tl.debug_barrier()
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        kept = _kept(line, entry, inside, total, floor)
        survives = tl.load(here + entry, mask=inside, other=0.0) >= threshold
        tl.store(
            here + entry, tl.where(survives | (kept >= peak), kept, 0.0), mask=inside
        )
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
        ids = tl.load(
            top.ids + (axis * rows + row) * K + column, mask=column < K, other=0
        )
        position = tl.load(sampling.positions + row) + axis
        score = tl.log(probs) - tl.log(
            exponential(tl.load(sampling.seeds + row), position, ids)
        )
        place = columns_of(tl.max(pack(score, column), axis=0))
        place = tl.where(
            cold, tl.load(likeliest.places + row * number + GIVEN + axis), place
        )
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
    """Same as the reference, which runs for blurs other than 1 and 3 and for more than
    three heads.
    """
    heads, rows, k = top.ids.shape
    if heads > MOST_HEADS or (adaptive and blur not in (1, 3)):
        return joint.draw_ngrams(joints, likeliest, top, blur, adaptive, sampling)
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
