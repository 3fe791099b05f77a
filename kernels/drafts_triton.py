# SPDX-License-Identifier: Apache-2.0
"""The end of a draft in one launch, and the store of q(x) in another.

finish is one program, so that its counts need no atomics, which memory of the host that the device sees may lack.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels.sampling import GREEDY_BELOW

BLOCK_R = 256  # requests at a time
BLOCK_V = 2048  # entries of q(x) a program
COLDEST = tl.constexpr(GREEDY_BELOW)


@triton.jit(do_not_specialize=["requests"])
def _finish(
    token_ids: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    most: tl.tensor,
    draft_tokens: tl.tensor,
    draft_stride: tl.tensor,
    known: tl.tensor,
    confidence: tl.tensor,
    confidence_stride: tl.tensor,
    counted: tl.tensor,
    requests: tl.tensor,
    made: tl.tensor,
    stand_in: tl.tensor,
    HAS_COUNTS: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
) -> None:
    draft = tl.arange(0, DRAFTS)[None, :]
    invalid = tl.zeros([BLOCK], dtype=tl.int64)
    stopped = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, requests, BLOCK):
        request = start + tl.arange(0, BLOCK)
        there = request < requests
        both = there[:, None] & (draft < made)
        ids = tl.load(token_ids + request[:, None] * made + draft, mask=both, other=0)
        # Drafts from the first INVALID one on are dropped.
        first = tl.min(tl.where(both & (ids < 0), draft, made), axis=1)
        allowed = tl.load(most + request, mask=there, other=0.0).to(tl.int64)
        wanted = tl.zeros([BLOCK], dtype=tl.int64) + made
        if HAS_COUNTS:
            wanted = tl.minimum(tl.load(counts + request, mask=there, other=0), wanted)
        usable = tl.minimum(wanted, allowed)
        real = there & (tl.load(rows + request, mask=there, other=-1) >= 0)
        invalid += (real & (first < usable)).to(tl.int64)
        stopped += (real & (wanted < tl.minimum(allowed, made))).to(tl.int64)
        at = draft_tokens + request[:, None] * draft_stride + draft
        tl.store(at, tl.where(ids < 0, stand_in, ids), mask=both)
        if HAS_CONFIDENCE:
            sure = tl.load(known + request[:, None] * made + draft, mask=both, other=0.0)
            usable = tl.minimum(usable, first)
            at = confidence + request[:, None] * confidence_stride + draft
            tl.store(at, tl.where(draft < usable[:, None], sure, 0.0), mask=both)
    tl.store(counted, tl.load(counted) + tl.sum(invalid, axis=0))
    tl.store(counted + 1, tl.load(counted + 1) + tl.sum(stopped, axis=0))


@triton.jit
def _store_q(
    q: tl.tensor,
    token_ids: tl.tensor,
    rows: tl.tensor,
    drawn_at: tl.tensor,
    temperature: tl.tensor,
    columns: tl.tensor,
    store: tl.tensor,
    row_stride: tl.tensor,
    draft_stride: tl.tensor,
    last_row: tl.tensor,
    made: tl.tensor,
    entries: tl.tensor,
    stand_in: tl.tensor,
    AS_LOGITS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    request, draft = line // made, line % made
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    column = entry.to(tl.int64)
    if HAS_COLUMNS:
        column = tl.load(columns + entry, mask=inside, other=0)
    values = tl.load(q + line * entries + entry, mask=inside, other=0.0)
    token = tl.load(token_ids + line)
    if (token < 0) | (tl.load(drawn_at + request) < COLDEST):
        values = tl.where(column == tl.where(token < 0, stand_in, token), 1.0, 0.0)
    if AS_LOGITS:
        heat = tl.load(temperature + request)
        values = tl.log(values) * tl.where(heat < COLDEST, 1.0, heat)
    row = tl.load(rows + request)
    row = tl.where(row < 0, last_row, row)
    tl.store(store + row * row_stride + draft * draft_stride + column, values, mask=inside)


def finish(
    token_ids: torch.Tensor,
    counts: torch.Tensor | None,
    rows: torch.Tensor,
    most: torch.Tensor,
    stand_in: int,
    draft_tokens: torch.Tensor,
    confidence: tuple[torch.Tensor, torch.Tensor] | None,
    counted: torch.Tensor,
) -> None:
    """As the reference."""
    requests, made = token_ids.shape
    known, out = (token_ids, draft_tokens) if confidence is None else (confidence[0].contiguous(), confidence[1])
    _finish[(1,)](
        token_ids.contiguous(),
        rows if counts is None else counts,
        rows,
        most,
        draft_tokens,
        draft_tokens.stride(0),
        known,
        out,
        out.stride(0),
        counted,
        requests,
        made,
        stand_in,
        HAS_COUNTS=counts is not None,
        HAS_CONFIDENCE=confidence is not None,
        BLOCK=BLOCK_R,
        DRAFTS=triton.next_power_of_2(made),
    )


def store_q(
    q: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    heat: torch.Tensor,
    temperature: torch.Tensor | None,
    columns: torch.Tensor | None,
    stand_in: int,
    store: torch.Tensor,
) -> None:
    """As the reference."""
    requests, made, entries = q.shape
    _store_q[(requests * made, triton.cdiv(entries, BLOCK_V))](
        q.contiguous(),
        token_ids.contiguous(),
        rows,
        heat,
        heat if temperature is None else temperature,
        rows if columns is None else columns,
        store,
        store.stride(0),
        store.stride(1),
        len(store) - 1,
        made,
        entries,
        stand_in,
        AS_LOGITS=temperature is not None,
        HAS_COLUMNS=columns is not None,
        BLOCK=BLOCK_V,
    )
