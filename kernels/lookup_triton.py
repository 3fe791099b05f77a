# SPDX-License-Identifier: Apache-2.0
"""Triton's form of lookup.py: a program for each part of a text, then one for each
request.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ppd.kernels.lookup import Texts

BLOCK = tl.constexpr(1024)  # places of a text that a program compares


def look_up(
    texts: Texts,
    rows: Tensor,
    shortest: int,
    longest: int,
    window: int,
    matched: Tensor,
    drafts: Tensor,
) -> None:
    window = min(window, texts.token_ids.shape[1])
    blocks = triton.cdiv(window, BLOCK.value)
    requests = len(rows)
    scores = torch.empty(requests, blocks, dtype=torch.int64, device=rows.device)
    _score[(requests, blocks)](
        texts.token_ids,
        texts.token_ids.stride(0),
        texts.lengths,
        rows,
        scores,
        window,
        shortest,
        LONGEST=longest,
    )
    _follow[(requests,)](
        texts.token_ids,
        texts.token_ids.stride(0),
        texts.lengths,
        rows,
        scores,
        matched,
        drafts,
        drafts.stride(0),
        window,
        blocks,
        K=drafts.shape[1],
        BLOCKS=triton.next_power_of_2(blocks),
        PLACES=triton.next_power_of_2(drafts.shape[1]),
    )


def judge(
    texts: Texts,
    rows: Tensor,
    drafts: Tensor,
    began: Tensor,
    trials: Tensor,
    gains: Tensor,
) -> None:
    width = drafts.shape[1]
    _judge[(len(rows),)](
        texts.token_ids,
        texts.token_ids.stride(0),
        texts.lengths,
        rows,
        drafts,
        began,
        trials,
        gains,
        K=width // 2,
        PLACES=triton.next_power_of_2(width),
    )


@triton.jit
def _score(
    token_ids,
    stride,
    lengths,
    rows,
    scores,  # [requests, blocks]
    window,
    shortest,
    LONGEST: tl.constexpr,
):
    """The best match that ends in a block of distances from a text's end: tokens that
    agree, then the least distance.
    """
    request = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + request)
    safe_row = tl.maximum(row, 0)
    length = tl.load(lengths + safe_row)
    last = tl.where(row >= 0, length, 1) - 1
    text = token_ids + safe_row * stride
    distance = 1 + block * BLOCK + tl.arange(0, BLOCK)
    agrees = (distance < window) & (distance <= last)
    agreeing = tl.zeros([BLOCK], tl.int64)
    for offset in tl.static_range(LONGEST):
        wanted = tl.load(text + last - offset, mask=last >= offset, other=-1)
        place = last - offset - distance
        agrees = agrees & (place >= 0) & (offset + distance < window)
        seen = tl.load(text + place, mask=agrees, other=-2)
        agrees = agrees & (seen == wanted)
        agreeing += agrees.to(tl.int64)
    score = agreeing * (window + 1) + window - distance
    score = tl.where(agreeing >= shortest, score, 0)
    tl.store(scores + request * tl.num_programs(1) + block, tl.max(score))


@triton.jit
def _follow(
    token_ids,
    stride,
    lengths,
    rows,
    scores,  # [requests, blocks]
    matched,  # [requests]
    drafts,  # [requests, K]
    drafts_stride,
    window,
    blocks,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Copy what followed the best match of a request."""
    request = tl.program_id(0)
    safe_row = tl.maximum(tl.load(rows + request), 0)
    last = tl.load(lengths + safe_row) - 1
    block = tl.arange(0, BLOCKS)
    score = tl.load(
        scores + request * blocks + block, mask=block < blocks, other=0
    )
    best = tl.max(score)
    agreeing = best // (window + 1)
    tl.store(matched + request, agreeing.to(tl.int32))
    distance = tl.where(agreeing > 0, window - best % (window + 1), 1)
    place = tl.arange(0, PLACES)
    source = last - distance + 1 + place % distance
    followed = place < tl.where(agreeing > 0, K, 0)
    token = tl.load(
        token_ids + safe_row * stride + source, mask=followed, other=0
    )
    tl.store(
        drafts + request * drafts_stride + place,
        token.to(tl.int64),
        mask=followed,
    )


@triton.jit
def _judge(
    token_ids,
    stride,
    lengths,
    rows,
    drafts,  # [requests, 1 + 2 K]
    began,  # [request rows + 1]
    trials,  # [request rows + 1, 1 + 2 K]
    gains,  # [kinds]
    K: tl.constexpr,
    PLACES: tl.constexpr,
):
    """End a request's trial and begin another. Counts are whole numbers, so their sums
    do not depend on the order of the programs.
    """
    request = tl.program_id(0)
    row = tl.load(rows + request)
    if row >= 0:
        place = tl.arange(0, PLACES)
        trial = trials + row * (1 + 2 * K)
        length = tl.load(lengths + row)
        start = tl.load(began + row)
        if (start > 0) & (length - start >= K):
            text = token_ids + row * stride + start
            inside = place < K
            token = tl.load(text + place, mask=inside, other=-2)
            found = tl.load(trial + 1 + place, mask=inside, other=-1)
            own = tl.load(trial + 1 + K + place, mask=inside, other=-1)
            gained = tl.min(tl.where(found == token, K, place))
            gained -= tl.min(tl.where(own == token, K, place))
            tl.atomic_add(gains + tl.load(trial), gained)
            start = start * 0
        if start == 0:
            inside = place < 1 + 2 * K
            new = drafts + request * (1 + 2 * K)
            kind = tl.load(new)
            tl.store(began + row, tl.where(kind > 1, length, 0))
            draft = tl.load(new + place, mask=inside, other=0)
            tl.store(trial + place, draft, mask=inside)
