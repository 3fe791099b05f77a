# SPDX-License-Identifier: Apache-2.0
"""Verification in one launch, a program per request."""

import torch
import triton
import triton.language as tl


@triton.jit
def _accept(
    drawn: tl.tensor,
    drafts: tl.tensor,
    starts: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    place = tl.arange(0, BLOCK)
    here, follows = place < end - start, place + 1 < end - start
    token = tl.load(drawn + start + place, mask=here, other=0)
    draft = tl.load(drafts + start + place + 1, mask=follows, other=-1)
    tl.store(tokens + request * width + place, token, mask=place < width)
    tl.store(counts + request, tl.min(tl.where(follows & (token == draft), BLOCK, place), axis=0) + 1)


def accept_drawn(
    drawn: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference; tokens past a request's last row of logits are 0."""
    requests = len(starts) - 1
    tokens = drafts.new_empty(requests, width)
    counts = torch.empty(requests, dtype=torch.int32, device=drawn.device)
    _accept[(requests,)](drawn, drafts, starts, tokens, counts, width, BLOCK=triton.next_power_of_2(width))
    return tokens, counts
