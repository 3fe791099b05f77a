# SPDX-License-Identifier: Apache-2.0
"""Floor, blur, Otsu's threshold and the cut through a joint in three launches, where torch needs some forty.

    blur       floor and Gaussian of every entry from its neighbours; least and greatest a part
    histogram  counts a row, by integer additions: the same in any order
    cut        Otsu's threshold, found anew by every program from 256 counts, and what it leaves

Product and mask (one operation each a head) stay torch's, so does the repetition penalty, which most requests lack.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import joint_threshold
from vllm_ppd.kernels.joint_threshold import BINS

BLOCK = 1024  # entries a program
MOST_AXES = 3  # of more than one entry
TINY = tl.constexpr(1.1754943508222875e-38)  # float32's least normal number


@triton.jit
def _kept(joint: tl.tensor, entry: tl.tensor, floor: tl.tensor, mask: tl.tensor) -> tl.tensor:
    values = tl.load(joint + entry, mask=mask, other=0.0)
    return tl.where(values >= floor, values, 0.0)


@triton.jit
def _bounds(bounds: tl.tensor, row: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Least and greatest of a row's blurred entries, greatest of its kept ones."""
    part = tl.arange(0, PARTS)
    at, inside = bounds + (row * parts + part) * 3, part < parts
    least = tl.min(tl.load(at, mask=inside, other=float("inf")), axis=0)
    greatest = tl.max(tl.load(at + 1, mask=inside, other=float("-inf")), axis=0)
    return least, greatest, tl.max(tl.load(at + 2, mask=inside, other=float("-inf")), axis=0)


@triton.jit
def _blur(
    joint: tl.tensor,  # [rows, entries] float32
    floor: tl.tensor,  # [rows] float32
    blurred: tl.tensor,  # [rows, entries] float32
    bounds: tl.tensor,  # [rows, parts, 3] float32: least and greatest of the blurred, greatest of the kept
    size_a: tl.tensor,
    size_b: tl.tensor,
    size_c: tl.tensor,
    edge: tl.tensor,
    centre: tl.tensor,
    REACH_A: tl.constexpr,
    REACH_B: tl.constexpr,
    REACH_C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    entries = size_a * size_b * size_c
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    c, b, a = entry % size_c, entry // size_c % size_b, entry // (size_b * size_c)
    least = tl.load(floor + row)
    here = joint + row * entries
    total = tl.zeros((BLOCK,), tl.float32)
    # Innermost the first axis, as the reference blurs axis after axis.
    for k in tl.static_range(-REACH_C, REACH_C + 1):
        column = tl.minimum(tl.maximum(c + k, 0), size_c - 1)
        plane = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(-REACH_B, REACH_B + 1):
            line = tl.minimum(tl.maximum(b + j, 0), size_b - 1)
            sheet = tl.zeros((BLOCK,), tl.float32)
            for i in tl.static_range(-REACH_A, REACH_A + 1):
                depth = tl.minimum(tl.maximum(a + i, 0), size_a - 1)
                value = _kept(here, (depth * size_b + line) * size_c + column, least, inside)
                sheet += value * (1.0 if REACH_A == 0 else centre if i == 0 else edge)
            plane += sheet * (1.0 if REACH_B == 0 else centre if j == 0 else edge)
        total += plane * (1.0 if REACH_C == 0 else centre if k == 0 else edge)
    tl.store(blurred + row * entries + entry, total, mask=inside)
    at = bounds + (row * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(at, tl.min(tl.where(inside, total, float("inf")), axis=0))
    tl.store(at + 1, tl.max(tl.where(inside, total, float("-inf")), axis=0))
    tl.store(at + 2, tl.max(_kept(here, entry, least, inside), axis=0))


@triton.jit
def _histogram(
    blurred: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,  # [rows, BINS] int32
    entries: tl.tensor,
    parts: tl.tensor,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    least, greatest, _ = _bounds(bounds, row, parts, PARTS)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(blurred + row * entries + entry, mask=entry < entries, other=0.0)
    above = tl.where(entry < entries, values - least, 0.0)
    share = tl.div_rn(above, tl.zeros((BLOCK,), tl.float32) + tl.maximum(greatest - least, TINY))
    index = tl.minimum(tl.maximum((share * BINS).to(tl.int32), 0), BINS - 1)
    entries_of_bin = tl.histogram(index, BINS, mask=entry < entries)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + row * BINS + bins, entries_of_bin, mask=entries_of_bin > 0)


@triton.jit
def _cut(
    joint: tl.tensor,
    floor: tl.tensor,
    blurred: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,
    result: tl.tensor,  # [rows, entries] float32
    entries: tl.tensor,
    parts: tl.tensor,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    least, greatest, peak = _bounds(bounds, row, parts, PARTS)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + row * BINS + bins).to(tl.float64)
    weighted = count * (bins.to(tl.float64) + 0.5)
    below, mass = tl.cumsum(count, axis=0), tl.cumsum(weighted, axis=0)
    above, rest = tl.sum(count, axis=0) - below, tl.sum(weighted, axis=0) - mass
    gap = mass / tl.maximum(below, 1.0) - rest / tl.maximum(above, 1.0)
    variance = tl.where(bins < BINS - 1, below * above * gap * gap, -1.0)
    cut = tl.argmax(variance, axis=0) + 1
    threshold = least + tl.maximum(greatest - least, TINY) * cut.to(tl.float32) / BINS
    threshold = tl.where(greatest > least, threshold, least)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    kept = _kept(joint + row * entries, entry, tl.load(floor + row), inside)
    smooth = tl.load(blurred + row * entries + entry, mask=inside, other=0.0)
    survives = tl.maximum((smooth >= threshold).to(tl.int32), (kept >= peak).to(tl.int32)) == 1
    tl.store(result + row * entries + entry, tl.where(survives, kept, 0.0), mask=inside)


def adaptive_threshold(
    joint: torch.Tensor,
    floor: torch.Tensor,
    blur: int = 3,
    adaptive: bool = True,
) -> torch.Tensor:
    """As the reference; other blurs than 1 and 3, other types than float32 and more than three axes go through it.

    NaN is under every floor, so it becomes 0, as in the reference.
    """
    sizes = [size for size in joint.shape[1:] if size > 1]
    if (
        not adaptive
        or blur not in (1, 3)
        or joint.dtype != torch.float32
        or len(sizes) > MOST_AXES
        or not joint.numel()
    ):
        return joint_threshold.adaptive_threshold(joint, floor, blur, adaptive)
    joint, floor = joint.contiguous(), floor.to(torch.float32).contiguous()
    rows, entries = len(joint), math.prod(sizes)
    a, b, c = [1] * (MOST_AXES - len(sizes)) + sizes
    parts = triton.cdiv(entries, BLOCK)
    grid, shape = (rows, parts), {"entries": entries, "parts": parts, "PARTS": triton.next_power_of_2(parts)}
    blurred, result = torch.empty_like(joint), torch.empty_like(joint)
    bounds = torch.empty(rows, parts, 3, dtype=torch.float32, device=joint.device)
    counts = torch.zeros(rows, BINS, dtype=torch.int32, device=joint.device)
    side = math.exp(-1 / (2 * 0.8**2))  # sigma of a kernel of three
    reach = {f"REACH_{name}": int(blur == 3 and size > 1) for name, size in zip("ABC", (a, b, c), strict=True)}
    _blur[grid](joint, floor, blurred, bounds, a, b, c, side / (1 + 2 * side), 1 / (1 + 2 * side), **reach, BLOCK=BLOCK)
    _histogram[grid](blurred, bounds, counts, **shape, BINS=BINS, BLOCK=BLOCK)
    _cut[grid](joint, floor, blurred, bounds, counts, result, **shape, BINS=BINS, BLOCK=BLOCK)
    return result
