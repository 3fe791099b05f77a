# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint and the n-grams to draft, in three launches where torch needs about
two hundred and sixty.

find peaks  a program per row, order and part of the joint's entries: product, mask by
            binary search, sum and maximum
back off    a program per row: the merged parts, the order, and its tokens
draw        a program per row, at its order only: floor and blur, Otsu's threshold, cut,
            token by token
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ppd.kernels import joint
from vllm_ppd.kernels.joint import Likeliest, Ngrams, Peaks, Top
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.sampling_triton import (
    COLDEST,
    INF,
    INVALID,
    NOTHING,
    columns_of,
    exponential,
    pack,
    values_of,
)

INT64 = torch.int64
BLOCK = tl.constexpr(1024)  # entries of a program at a time
TINY = tl.constexpr(joint.TINY)
EDGE = tl.constexpr(joint.EDGE)
CENTER = tl.constexpr(joint.CENTER)
BINS = tl.constexpr(joint.BINS)


@triton.jit
def _digits(ngrams: Ngrams | None, token_ids):
    """See Ngrams.digits."""
    digits = token_ids
    if ngrams is not None:  # noqa: SIM102 (only known at compile time)
        if ngrams.columns is not None:
            known = _near(token_ids, ngrams.vocab_size)
            digits = tl.load(ngrams.columns + known)
    return digits


@triton.jit
def _near(place, size):
    """Places on an axis, those beyond an edge replaced by the edge."""
    return tl.minimum(tl.maximum(place, 0), size - 1)


@triton.jit
def _entries_of(free, K: tl.constexpr, HEADS: tl.constexpr):
    """How many entries a joint has, given the number of axes of more than one."""
    size = tl.full((), 1, tl.int64)
    for axis in tl.static_range(HEADS):
        size = tl.where(axis < free, size * K, size)
    return size


@triton.jit
def _divided(values, divisor):
    """values / divisor, rounded as torch does."""
    return tl.div_rn(values, tl.zeros_like(values) + divisor)


@triton.jit(do_not_specialize=["rows", "steps"])
def _find_peaks(
    top: Top,
    ngrams: Ngrams | None,
    peaks: Peaks,
    joints: tl.tuple,  # one per order, or none
    rows,
    steps,  # number of steps of the binary search
    HEADS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,  # 1 with a first token, else 0
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    order = tl.program_id(2) + 1
    free = order - GIVEN  # axes of more than one entry
    size = _entries_of(free, K, HEADS)
    at = ((order - 1) * rows + row) * tl.num_programs(1) + part
    if part * BLOCK >= size:
        tl.store(peaks.sums + at, 0.0)
        tl.store(peaks.entries + at, -INF)
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
            head = top.scores + line
            scores = tl.load(head + column, mask=column < K, other=-INF)
            peak = tl.max(scores, axis=0)
            total = tl.sum(tl.exp(scores - peak), axis=0)
            product *= _divided(tl.exp(tl.load(head + rest % K) - peak), total)
            wanted += _digits(ngrams, tl.load(top.ids + line + rest % K)) * weight
            weight *= 1 if ngrams is None else ngrams.base
            place = rest % K
            rest = rest // K
            if top.pairs is not None and axis > 0:
                pair = ((axis - 1) * rows + row) * K + rest % K
                product *= tl.exp(tl.load(top.pairs + pair * K + place))
    if ngrams is not None:  # noqa: SIM102 (only the first is known at compile time)
        if order > 1:
            if GIVEN:
                wanted += _digits(ngrams, tl.load(top.first_token + row)) * weight
            bounds = ngrams.starts + order
            low = tl.zeros((BLOCK,), tl.int64) + tl.load(bounds - 2)
            # The sentinel
            high = tl.zeros((BLOCK,), tl.int64) + tl.load(bounds - 1) - 1
            for _ in range(steps):
                middle = (low + high) // 2
                less = tl.load(ngrams.keys + middle) < wanted
                low = tl.where(less, middle + 1, low)
                high = tl.where(less, high, middle)
            ratio = tl.load(ngrams.ratios + low)
            product *= tl.where(tl.load(ngrams.keys + low) == wanted, ratio, 0.0)
    best = tl.max(tl.where(inside, pack(product, entry), NOTHING), axis=0)
    product_inside = tl.where(inside, product, 0.0)
    tl.store(peaks.sums + at, tl.sum(product_inside, axis=0))
    tl.store(peaks.entries + at, values_of(best))
    tl.store(peaks.places + at, columns_of(best))
    for below in tl.static_range(len(joints)):
        if below + 1 == order:
            tl.store(joints[below] + row * size + entry, product, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _back_off(
    peaks: Peaks,
    top: Top,
    eps_b,
    likeliest: Likeliest,
    rows,
    parts,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    GIVEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    eps = tl.load(eps_b + row)
    finite = tl.full((), 1, tl.int1)
    for below in tl.static_range(HEADS + GIVEN):
        at = (below * rows + row) * parts + part
        sums = tl.load(peaks.sums + at, mask=part < parts, other=0.0)
        finite = finite & (tl.abs(tl.sum(sums, axis=0)) < INF)
    order = tl.full((), 1, tl.int64)
    entry = tl.full((), 0, tl.int64)
    power = tl.full((), 1.0, tl.float32)
    floor = tl.full((), 0.0, tl.float32)
    total = floor
    for below in tl.static_range(HEADS + GIVEN):
        at = (below * rows + row) * parts + part
        sums = tl.load(peaks.sums + at, mask=part < parts, other=0.0)
        mass = tl.sum(sums, axis=0)
        value = tl.load(peaks.entries + at, mask=part < parts, other=-INF)
        place = tl.load(peaks.places + at, mask=part < parts, other=0).to(
            tl.int32
        )
        keys = tl.where(part < parts, pack(value, place), NOTHING)
        best = tl.max(keys, axis=0)
        if below == 0:
            entry = columns_of(best)
            total = mass
        else:
            power *= eps
            share = tl.div_rn(values_of(best), tl.maximum(mass, TINY))
            taken = finite & (share > power)
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
        tl.store(
            likeliest.tokens + line + GIVEN + axis, tl.where(taken, token, -1)
        )
        tl.store(likeliest.places + line + GIVEN + axis, place)


def find_peaks(
    top: Top, ngrams: Ngrams | None, with_joints: bool = True
) -> tuple[Peaks, list[Tensor]]:
    """Same as the reference, but with several parts per row."""
    heads, rows, k = top.ids.shape
    given = int(top.first_token is not None)
    orders = heads + given
    shape = (orders, rows, triton.cdiv(k**heads, BLOCK.value))
    sums = torch.empty(shape, dtype=torch.float32, device=top.ids.device)
    peaks = Peaks(
        sums, torch.empty_like(sums), torch.empty_like(sums, dtype=INT64)
    )
    joints = []
    for order in range(1, orders + 1):
        if with_joints:
            axes = [1] * given + [k] * (order - given)
            joints.append(sums.new_empty(rows, *axes))
    steps = 0 if ngrams is None else ngrams.bounds[-1].bit_length()
    _find_peaks[(rows, shape[2], orders)](
        top,
        ngrams,
        peaks,
        tuple(joints),
        rows,
        steps,
        HEADS=heads,
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        GIVEN=given,
    )
    return peaks, joints


def back_off(peaks: Peaks, top: Top, eps_b: Tensor) -> Likeliest:
    """Same as the reference."""
    heads, rows, k = top.ids.shape
    given = int(top.first_token is not None)
    parts = peaks.sums.shape[2]
    order = torch.empty(rows, dtype=INT64, device=eps_b.device)
    tokens = order.new_empty(rows, heads + given)
    floor = torch.empty_like(eps_b)
    likeliest = Likeliest(
        order,
        torch.empty_like(order),
        tokens,
        torch.empty_like(tokens),
        floor,
        torch.empty_like(floor),
    )
    _back_off[(rows,)](
        peaks,
        top,
        eps_b,
        likeliest,
        rows,
        parts,
        HEADS=heads,
        K=k,
        GIVEN=given,
        PARTS=triton.next_power_of_2(parts),
    )
    return likeliest


BLOCK_R = tl.constexpr(16)  # entries at a time per candidate


@triton.jit
def _kept(
    line,
    entry,
    inside,
    total,
    floor,
):
    """Shares of a row's entries, 0 below the floor."""
    share = _divided(tl.load(line + entry, mask=inside, other=0.0), total)
    return tl.where(share >= floor, share, 0.0)


@triton.jit
def _blurred(
    line,
    entry,
    inside,
    total,
    floor,
    free,  # axes of more than one entry
    HEADS: tl.constexpr,
    K: tl.constexpr,
):
    """A Gaussian blur of the kept entries over all axes."""
    blurred = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(3**HEADS):
        weight = tl.full((), 1.0, tl.float32)
        beside = tl.zeros((BLOCK,), tl.int64)
        for axis in tl.static_range(HEADS):  # from the last on
            shift = number // 3**axis % 3 - 1
            weight *= EDGE if shift != 0 else CENTER
            place = entry // K**axis % K + shift
            size = tl.where(axis < free, K, 1)
            beside += _near(place, size) * K**axis
        blurred += weight * _kept(line, beside, inside, total, floor)
    return blurred


@triton.jit
def _threshold(
    blurred,  # where the row's blurred entries begin
    size,
    least,
    greatest,
):
    """Otsu's threshold, from a histogram between the least and the greatest entry."""
    width = tl.maximum(greatest - least, TINY)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        above = tl.load(blurred + entry, mask=inside, other=0.0) - least
        index = (_divided(tl.where(inside, above, 0.0), width) * BINS).to(
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
    joint,  # where the row's entries begin
    prefix,  # the places drawn so far, as a number to the base K
    rest,  # entries of each candidate
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
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
def _limited(probs, sampling: Sampling, row):
    """A distribution cut to a row's top-k and top-p: [K_BLOCK]."""
    is_larger = probs[None, :] > probs[:, None]
    larger = tl.sum(is_larger.to(tl.float32), axis=1)
    most = tl.load(sampling.top_k + row).to(tl.float32)
    probs = tl.where(larger < most, probs, 0.0)
    smaller = probs[None, :] <= probs[:, None]
    up_to = tl.sum(tl.where(smaller, probs[None, :], 0.0), axis=1)
    dropped_share = 1 - tl.load(sampling.top_p + row)
    outside = up_to <= dropped_share * tl.sum(probs, axis=0)
    probs = tl.where(outside & (probs < tl.max(probs, axis=0)), 0.0, probs)
    return probs / tl.maximum(tl.sum(probs, axis=0), TINY)


@triton.jit(do_not_specialize=["rows"])
def _draw_ngrams(
    joints: tl.tuple,
    likeliest: Likeliest,
    top: Top,
    sampling: Sampling,
    scratch,  # [rows, entries of the highest order] float32
    tokens,
    rows,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,  # 1 with a first token, else 0
):
    row = tl.program_id(0).to(tl.int64)
    order = tl.load(likeliest.order + row)
    free = order - GIVEN  # axes of more than one entry
    size = _entries_of(free, K, HEADS)
    line = joints[0]
    for below in tl.static_range(1, len(joints)):
        line = tl.where(order == below + 1, joints[below], line)
    line += row * size
    here = scratch + row * K**HEADS
    total = tl.maximum(tl.load(likeliest.total + row), TINY)
    floor = tl.load(likeliest.floor + row)

    # Otsu's threshold, of the blurred entries in the scratch memory.
    least = tl.full((), INF, tl.float32)
    greatest = tl.full((), -INF, tl.float32)
    peak = greatest
    threshold = least
    if order > 1:
        for start in range(0, size, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            inside = entry < size
            smooth = _blurred(
                line,
                entry,
                inside,
                total,
                floor,
                free,
                HEADS,
                K,
            )
            tl.store(here + entry, smooth, mask=inside)
            kept = _kept(line, entry, inside, total, floor)
            low = tl.min(tl.where(inside, smooth, INF), axis=0)
            high = tl.max(tl.where(inside, smooth, -INF), axis=0)
            least = tl.minimum(least, low)
            greatest = tl.maximum(greatest, high)
            peak = tl.maximum(peak, tl.max(kept, axis=0))
        tl.debug_barrier()
        threshold = _threshold(here, size, least, greatest)
        tl.debug_barrier()
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        kept = _kept(line, entry, inside, total, floor)
        smooth = tl.load(here + entry, mask=inside, other=0.0)
        survives = (smooth >= threshold) | (kept >= peak)
        tl.store(here + entry, tl.where(survives, kept, 0.0), mask=inside)
    tl.debug_barrier()

    # A draw, token by token.
    cold = tl.load(sampling.temperature + row) < COLDEST
    seed = tl.load(sampling.seeds + row)
    position = tl.load(sampling.positions + row)
    column = tl.arange(0, K_BLOCK)
    prefix = tl.full((), 0, tl.int64)
    rest = size
    number = HEADS + GIVEN
    for axis in tl.static_range(HEADS):
        rest = tl.where(axis < free, rest // K, 0)  # none past the order
        probs = _marginal(here, prefix, rest, K, K_BLOCK)
        mass = tl.sum(probs, axis=0)
        valid = (mass > 0) & (axis < free)
        probs = _limited(probs / tl.maximum(mass, TINY), sampling, row)
        # In log space, where an entry of probability 0 never wins over another.
        head = top.ids + (axis * rows + row) * K
        ids = tl.load(head + column, mask=column < K, other=0)
        variates = exponential(seed, position + axis, ids)
        score = tl.log(probs) - tl.log(variates)
        drawn = columns_of(tl.max(pack(score, column), axis=0))
        at = row * number + GIVEN + axis
        place = tl.where(cold, tl.load(likeliest.places + at), drawn)
        token = tl.where(valid, tl.load(head + place), INVALID)
        tl.store(tokens + at, token)
        prefix = prefix * K + place
    if GIVEN:
        tl.store(tokens + row * number, tl.load(top.first_token + row))


def draw_ngrams(
    joints: Sequence[Tensor],
    likeliest: Likeliest,
    top: Top,
    sampling: Sampling,
) -> Tensor:
    """Same as the reference."""
    heads, rows, k = top.ids.shape
    tokens = torch.empty_like(likeliest.tokens)
    _draw_ngrams[(rows,)](
        tuple(joints),
        likeliest,
        top,
        sampling,
        torch.empty(rows, k**heads, dtype=torch.float32, device=tokens.device),
        tokens,
        rows,
        HEADS=heads,
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        GIVEN=int(top.first_token is not None),
        num_warps=8,
    )
    return tokens
