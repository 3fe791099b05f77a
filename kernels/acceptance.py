# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: a draft is accepted if it is the token that the target draws at its position."""

import torch


def accept_drawn(
    drawn: torch.Tensor,  # [logits] int64, the token that the target draws at each position
    drafts: torch.Tensor,  # [logits] the input token of each row of logits; a draft, except in a request's first row
    starts: torch.Tensor,  # [requests + 1] int32, where each request's rows of logits begin
    width: int,  # K + 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each request's drafts up to the first that differs from the drawn token; -1 means no draft.

    Returns:
        (tokens [requests, K + 1] in the drafts' type, counts [requests] int32 of the tokens that each request emits).
    """
    begin, end = starts[:-1, None].long(), starts[1:, None].long()
    places = begin + torch.arange(width, device=drawn.device)
    inside = places.clamp(max=len(drawn) - 1)
    tokens, follows = drawn[inside], drafts[inside[:, 1:]]
    accepted = (tokens[:, :-1] == follows) & (places[:, 1:] < end)
    return tokens.to(drafts.dtype), (accepted.cumprod(dim=1).sum(dim=1) + 1).int()
