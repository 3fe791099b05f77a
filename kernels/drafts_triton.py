# SPDX-License-Identifier: Apache-2.0
"""The last part of drafting in one launch.

finish runs as one program, so its count needs no atomics, which host memory mapped to the device may not support.
"""

import torch
import triton
import triton.language as tl

BLOCK_R = 256  # requests at a time


@triton.jit(do_not_specialize=["requests"])
def _finish(
    token_ids: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    most: tl.tensor,
    draft_tokens: tl.tensor,
    draft_stride: tl.tensor,
    invalid: tl.tensor,
    requests: tl.tensor,
    made: tl.tensor,
    stand_in: tl.tensor,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
) -> None:
    draft = tl.arange(0, DRAFTS)[None, :]
    damaged = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, requests, BLOCK):
        request = start + tl.arange(0, BLOCK)
        there = request < requests
        both = there[:, None] & (draft < made)
        ids = tl.load(token_ids + request[:, None] * made + draft, mask=both, other=0)
        # Drafts from the first INVALID draft on do not count.
        first = tl.min(tl.where(both & (ids < 0), draft, made), axis=1)
        usable = tl.minimum(tl.load(most + request, mask=there, other=0.0).to(tl.int64), made)
        if HAS_COUNTS:
            usable = tl.minimum(tl.load(counts + request, mask=there, other=0), usable)
        real = there & (tl.load(rows + request, mask=there, other=-1) >= 0)
        damaged += (real & (first < usable)).to(tl.int64)
        at = draft_tokens + request[:, None] * draft_stride + draft
        tl.store(at, tl.where(ids < 0, stand_in, ids), mask=both)
    tl.store(invalid, tl.load(invalid) + tl.sum(damaged, axis=0))


def finish(
    token_ids: torch.Tensor,
    counts: torch.Tensor | None,
    rows: torch.Tensor,
    most: torch.Tensor,
    stand_in: int,
    draft_tokens: torch.Tensor,
    invalid: torch.Tensor,
) -> None:
    """Same as the reference."""
    requests, made = token_ids.shape
    _finish[(1,)](
        token_ids.contiguous(),
        rows if counts is None else counts,
        rows,
        most,
        draft_tokens,
        draft_tokens.stride(0),
        invalid,
        requests,
        made,
        stand_in,
        HAS_COUNTS=counts is not None,
        BLOCK=BLOCK_R,
        DRAFTS=triton.next_power_of_2(made),
    )
