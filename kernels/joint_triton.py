# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint and the n-grams to draft, in two launches where torch needs about sixty.

find peaks  a program per row, order and part of the joint's entries: product, mask by binary search, sum and maximum
back off    a program per row: the merged parts, the order, and its tokens
"""

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import joint
from vllm_ppd.kernels.joint import Likeliest, Ngrams, Peaks, Top
from vllm_ppd.kernels.ordered_keys import NOTHING, columns_of, pack, values_of

BLOCK = 1024  # entries per program
TINY = tl.constexpr(joint.TINY)


@triton.jit
def _digits(ngrams: Ngrams | None, token_ids: tl.tensor) -> tl.tensor:
    """See Ngrams.digits."""
    digits = token_ids
    if ngrams is not None:  # noqa: SIM102 (only known at compile time)
        if ngrams.columns is not None:
            last = tl.zeros_like(token_ids) + ngrams.vocab_size - 1
            digits = tl.load(ngrams.columns + tl.minimum(tl.maximum(token_ids, 0), last))
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
    row, part, order = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) + 1
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
    wanted = tl.zeros((BLOCK,), tl.int64)  # the n-gram's key, built from the last token to the first
    weight = tl.full((), 1, tl.int64)
    rest, column = entry, tl.arange(0, K_BLOCK)
    for behind in tl.static_range(HEADS):
        axis = HEADS - 1 - behind
        if axis < free:
            line = (axis * rows + row) * K
            scores = tl.load(top.scores + line + column, mask=column < K, other=float("-inf"))
            peak = tl.max(scores, axis=0)
            share = tl.exp(tl.load(top.scores + line + rest % K) - peak)
            product *= tl.div_rn(share, tl.zeros((BLOCK,), tl.float32) + tl.sum(tl.exp(scores - peak), axis=0))
            wanted += _digits(ngrams, tl.load(top.ids + line + rest % K)) * weight
            weight *= 1 if ngrams is None else ngrams.base
            rest = rest // K
    if ngrams is not None:  # noqa: SIM102 (only the first is known at compile time)
        if order > 1:
            if GIVEN:
                wanted += _digits(ngrams, tl.load(top.first_token + row)) * weight
            low = tl.zeros((BLOCK,), tl.int64) + tl.load(ngrams.starts + order - 2)
            high = tl.zeros((BLOCK,), tl.int64) + tl.load(ngrams.starts + order - 1) - 1  # the sentinel
            for _ in range(steps):
                middle = (low + high) // 2
                less = tl.load(ngrams.keys + middle) < wanted
                low, high = tl.where(less, middle + 1, low), tl.where(less, high, middle)
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
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    eps = tl.load(eps_b + row)
    eps = tl.where(eps == eps, eps, default)
    finite = tl.full((), 1, tl.int1)
    for below in tl.static_range(HEADS + GIVEN):
        at = (below * rows + row) * parts + part
        finite = finite & (
            tl.abs(tl.sum(tl.load(peaks.sums + at, mask=part < parts, other=0.0), axis=0)) < float("inf")
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
        packed = pack(value, tl.load(peaks.places + at, mask=part < parts, other=0).to(tl.int32))
        best = tl.max(tl.where(part < parts, packed, NOTHING), axis=0)
        if below == 0:
            entry, total = columns_of(best), mass
        else:
            power *= eps
            taken = finite & (tl.div_rn(values_of(best), tl.maximum(mass, TINY)) > power)
            order, entry = tl.where(taken, below + 1, order), tl.where(taken, columns_of(best), entry)
            floor, total = tl.where(taken, power, floor), tl.where(taken, mass, total)
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
    (heads, rows, k), given, device = top.ids.shape, int(top.first_token is not None), top.ids.device
    orders, parts = heads + given, triton.cdiv(k**heads, BLOCK)
    types = (torch.float32, torch.float32, torch.int64)
    peaks = Peaks(*(torch.empty(orders, rows, parts, dtype=dtype, device=device) for dtype in types))
    shapes = [[rows, *[1] * given, *[k] * (order - given)] for order in range(1, orders + 1)]
    joints = tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes if with_joints)
    steps = 0 if ngrams is None else ngrams.bounds[-1].bit_length()
    _find_peaks[(rows, parts, orders)](
        top, ngrams, peaks, joints, rows, steps,
        HEADS=heads, K=k, K_BLOCK=triton.next_power_of_2(k), GIVEN=given, ALPHA=alpha_c, BLOCK=BLOCK,
    )  # fmt: skip
    return peaks, list(joints)


def back_off(peaks: Peaks, top: Top, eps_b: torch.Tensor, default: float) -> Likeliest:
    """Same as the reference."""
    (heads, rows, k), given, parts = top.ids.shape, int(top.first_token is not None), peaks.sums.shape[2]
    integers = (
        torch.empty(rows, *n, dtype=torch.int64, device=eps_b.device) for n in ((), (), *[(heads + given,)] * 2)
    )
    likeliest = Likeliest(*integers, *(torch.empty(rows, dtype=torch.float32, device=eps_b.device) for _ in range(2)))
    _back_off[(rows,)](
        peaks, top, eps_b, likeliest, rows, parts, default,
        HEADS=heads, K=k, GIVEN=given, PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return likeliest
