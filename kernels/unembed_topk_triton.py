# SPDX-License-Identifier: Apache-2.0
"""Unembedding and top-k in one pass over E*, without writing logits.

    scan    each program takes every P-th block of the vocabulary, multiplies it with all rows and keeps the k best keys
            and a log-sum-exp per row, in registers
    merge   a program per row: the k best of P * k keys, and the sum of P log-sum-exps

It serves the few rows of decoding, where reading E* dominates. Above MOST_ROWS rows or k = MOST_K the reference runs,
as the library is best at large products. Ties go to the lowest id for every k (the reference promises that for k = 1).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import unembed_topk as reference
from vllm_ppd.kernels.early_topk import ShardTopK
from vllm_ppd.kernels.ordered_keys import NOTHING, columns_of, pack, values_of
from vllm_ppd.kernels.sampling import INVALID as NO_TOKEN

MOST_ROWS, MOST_K = 64, 8
BLOCK_V = 64  # with 128 hidden of bfloat16: 16 KiB per stage, three of which fit every GPU's shared memory
PROGRAMS_A_PROCESSOR = 2
INVALID = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["rows"])
def _scan(
    hidden: tl.tensor,
    unembedding: tl.tensor,
    bias: tl.tensor,
    keys: tl.tensor,  # [P, rows, K] int64
    maxima: tl.tensor,  # [P, rows] float32
    sums: tl.tensor,  # [P, rows] float32
    rows: tl.tensor,
    width: tl.tensor,
    num_valid: tl.tensor,
    step_hidden: tl.tensor,
    step_unembedding: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WITH_SUM: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, K_PADDED)
    # Unique, as keys are, so that a better key replaces the lowest of them and no other.
    best = tl.zeros((K_PADDED, ROWS), tl.int64) + NOTHING + slot[:, None] + 1
    best = tl.where((slot >= K)[:, None], 0x7FFFFFFFFFFFFFFF, best)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_valid, BLOCK_V), tl.num_programs(0)):
        column = block * BLOCK_V + tl.arange(0, BLOCK_V)
        valid = column < num_valid
        weights = unembedding + column.to(tl.int64)[:, None] * step_unembedding + depth[None, :]
        states = hidden + row[None, :] * step_hidden + depth[:, None]
        logits = tl.zeros((BLOCK_V, ROWS), tl.float32)
        for start in range(0, width, BLOCK_D):
            inside = depth < width - start
            part = tl.load(weights + start, mask=valid[:, None] & inside[None, :], other=0.0)
            state = tl.load(states + start, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
            if UPCAST:  # the interpreter multiplies bfloat16 as if it were integers
                part, state = part.to(tl.float32), state.to(tl.float32)
            logits = tl.dot(part, state, logits, input_precision="ieee")
        if HAS_BIAS:
            logits += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)[:, None]
        logits = logits.to(hidden.dtype.element_ty).to(tl.float32)
        if WITH_SUM:
            shown = tl.where(valid[:, None], logits, float("-inf"))
            peak = tl.maximum(largest, tl.max(shown, axis=0))
            # Without a finite peak there is nothing to subtract; inf and NaN then come out as they are.
            shift = tl.where((peak == float("-inf")) | (peak == float("inf")), 0.0, peak)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(shown - shift[None, :]), axis=0)
            largest = peak
        candidates = tl.where(valid[:, None], pack(logits, column[:, None]), NOTHING)
        for _ in tl.static_range(K):
            new = tl.max(candidates, axis=0)
            lowest = tl.min(best, axis=0)
            best = tl.where((best == lowest[None, :]) & (new > lowest)[None, :], new[None, :], best)
            candidates = tl.where(candidates == new[None, :], NOTHING, candidates)
    at = (tl.program_id(0) * rows + row) * K
    tl.store(keys + at[None, :] + slot[:, None], best, mask=(slot < K)[:, None] & (row < rows)[None, :])
    if WITH_SUM:
        tl.store(maxima + tl.program_id(0) * rows + row, largest, mask=row < rows)
        tl.store(sums + tl.program_id(0) * rows + row, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    keys: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    token_ids: tl.tensor,
    logsumexp: tl.tensor,
    rows: tl.tensor,
    programs: tl.tensor,
    vocab_start: tl.tensor,
    WITH_SUM: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    place = tl.arange(0, CANDIDATES)
    at = (place // K * rows + row) * K + place % K
    candidates = tl.load(keys + at, mask=place < programs * K, other=NOTHING)
    for i in tl.static_range(K):
        best = tl.max(candidates, axis=0)
        value = values_of(best)
        tl.store(values + row * K + i, value)
        tl.store(
            token_ids + row * K + i, tl.where(tl.abs(value) < float("inf"), columns_of(best) + vocab_start, INVALID)
        )
        candidates = tl.where(candidates == best, NOTHING, candidates)
    if WITH_SUM:
        part = tl.arange(0, PARTS)
        largest = tl.load(maxima + part * rows + row, mask=part < programs, other=float("-inf"))
        total = tl.load(sums + part * rows + row, mask=part < programs, other=0.0)
        peak = tl.max(largest, axis=0)
        shift = tl.where((peak == float("-inf")) | (peak == float("inf")), 0.0, peak)
        tl.store(logsumexp + row, tl.log(tl.sum(total * tl.exp(largest - shift), axis=0)) + shift)


@lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """The number of programs that fill a device; a few in the interpreter, so that merging is tested, too."""
    if device.type != "cuda":
        return 3
    return PROGRAMS_A_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def unembed_topk(
    hidden: torch.Tensor,
    unembedding: torch.Tensor,
    k: int,
    vocab_start: int,
    num_valid: int,
    bias: torch.Tensor | None = None,
    with_logsumexp: bool = True,
) -> ShardTopK:
    """Same as the reference, which runs for many rows, a large k, float64 and strided columns."""
    rows, width = hidden.shape
    fits = 0 < rows <= MOST_ROWS and 1 <= k <= min(MOST_K, num_valid) and hidden.dtype == unembedding.dtype
    known = hidden.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (fits and known and hidden.stride(1) == 1 and unembedding.stride(1) == 1):
        return reference.unembed_topk(hidden, unembedding, k, vocab_start, num_valid, bias, with_logsumexp)
    device = hidden.device
    programs = min(_programs(device), triton.cdiv(num_valid, BLOCK_V))
    keys = torch.empty(programs, rows, k, dtype=torch.int64, device=device)
    # Two tensors: the alignment of the halves of one, and so the compiled code, would depend on the number of rows.
    maxima, sums = (torch.empty(programs, rows, dtype=torch.float32, device=device) for _ in range(2))
    padded_rows = max(16, triton.next_power_of_2(rows))
    _scan[(programs,)](
        hidden, unembedding, hidden if bias is None else bias, keys, maxima, sums,
        rows, width, num_valid, hidden.stride(0), unembedding.stride(0),
        HAS_BIAS=bias is not None, WITH_SUM=with_logsumexp, UPCAST=device.type != "cuda",
        ROWS=padded_rows, K=k, K_PADDED=triton.next_power_of_2(k), BLOCK_V=BLOCK_V,
        BLOCK_D=(256 if padded_rows == 16 else 128) // hidden.element_size(), num_stages=3,
    )  # fmt: skip
    values = torch.empty(rows, k, dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    logsumexp = torch.empty(rows, dtype=torch.float32, device=device)
    _merge[(rows,)](
        keys, maxima, sums, values, token_ids, logsumexp, rows, programs, vocab_start,
        WITH_SUM=with_logsumexp, K=k,
        PARTS=triton.next_power_of_2(programs), CANDIDATES=triton.next_power_of_2(programs * k),
    )  # fmt: skip
    return ShardTopK(values, token_ids, logsumexp)
