# SPDX-License-Identifier: Apache-2.0
"""Triton's form of answers.py: one program gives each request its places, then a
program moves and keeps a position.
"""

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels.answers import Kept, Verified
from vllm_ppd.kernels.lookup import Texts

REQUESTS = tl.constexpr(128)  # at a time
BLOCK = tl.constexpr(1024)  # elements of a state at a time


def collect(step: Verified, texts: Texts, kept: Kept, held: int) -> None:
    """Same as the reference."""
    requests = len(step.rows)
    following = kept.tokens.shape[1]
    sums = torch.empty(
        requests + 1, 2, dtype=torch.int64, device=kept.counts.device
    )
    _place[(1,)](
        step.rows,
        texts.lengths,
        kept,
        sums,
        requests,
        held,
        FOLLOWING=following,
    )
    _collect[(requests, following)](
        step,
        texts,
        kept,
        sums,
        texts.token_ids.stride(0),
        step.hidden.stride(0),
        kept.recent.shape[2],
        len(kept.tokens) - held,
        WINDOW=kept.recent.shape[1],
        FOLLOWING=following,
        TOKENS=triton.next_power_of_2(following),
    )


@triton.jit(do_not_specialize=["requests"])
def _place(
    rows,
    lengths,
    kept: Kept,
    sums,  # [requests + 1, 2]: before each request, in the ring and held out
    requests,
    held,
    FOLLOWING: tl.constexpr,
):
    learned = tl.load(kept.counts)
    held_out = tl.load(kept.counts + 1)
    tl.store(sums, learned)
    tl.store(sums + 1, held_out)
    for start in range(0, requests, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        inside = request < requests
        row = tl.load(rows + request, mask=inside, other=0)
        first = tl.load(kept.first + row, mask=inside, other=0)
        known = tl.load(lengths + row, mask=inside, other=0) - FOLLOWING
        complete = tl.minimum(tl.maximum(known - first, 0), FOLLOWING)
        tl.store(kept.first + row, first + complete, mask=inside)
        may = tl.load(kept.holds_out + row, mask=inside, other=0) * complete
        total = learned + held_out + tl.cumsum(complete)
        held_sum = tl.minimum(held_out + tl.cumsum(may), held)
        following = sums + 2 * request + 2
        tl.store(following, total - held_sum, mask=inside)
        tl.store(following + 1, held_sum, mask=inside)
        held_out = tl.max(held_sum)
        learned = tl.max(total) - held_out
    tl.store(kept.counts, learned)
    tl.store(kept.counts + 1, held_out)


@triton.jit
def _collect(
    step: Verified,
    texts: Texts,
    kept: Kept,
    sums,
    text_stride,
    hidden_stride,
    size,  # elements of a state
    ring,
    WINDOW: tl.constexpr,
    FOLLOWING: tl.constexpr,
    TOKENS: tl.constexpr,
):
    request = tl.program_id(0)
    number = tl.program_id(1)
    row = tl.load(step.rows + request).to(tl.int64)
    recent = kept.recent + row * WINDOW * size
    before = sums + 2 * request
    learned = tl.load(before)
    held_out = tl.load(before + 1)
    taken = tl.load(before + 3) - held_out
    complete = tl.load(before + 2) - learned + taken
    if number < complete:
        # _place has moved it on
        position = tl.load(kept.first + row) - complete + number
        in_ring = (learned + number - taken) % ring
        slot = tl.where(number < taken, ring + held_out + number, in_ring)
        ahead = tl.arange(0, TOKENS)
        inside = ahead < FOLLOWING
        text = texts.token_ids + row * text_stride + position + 1
        token = tl.load(text + ahead, mask=inside, other=0).to(tl.int64)
        tl.store(kept.tokens + slot * FOLLOWING + ahead, token, mask=inside)
        state = kept.states + slot * 2 * size
        _copy(recent + position % WINDOW * size, state, size)
        position += 1
        _copy(recent + position % WINDOW * size, state + size, size)
    if number < tl.load(step.num_sampled + request):
        end = tl.load(step.query_starts + request + 1).to(tl.int64)
        token = end - 1 - tl.load(step.num_rejected + request) - number
        position = tl.load(step.positions + token)
        hidden = step.hidden + token * hidden_stride
        _copy(hidden, recent + position % WINDOW * size, size)


@triton.jit
def _copy(source, target, size):
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        value = tl.load(source + column, mask=inside, other=0.0)
        tl.store(target + column, value, mask=inside)
