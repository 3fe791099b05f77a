# SPDX-License-Identifier: Apache-2.0
"""The last part of drafting on the device: replacing invalid drafts, and counting the requests that have any."""

import torch


def finish(
    token_ids: torch.Tensor,  # [requests, n] int64; INVALID where a draft had no valid distribution
    counts: torch.Tensor | None,  # [requests] int64, drafts that the method proposes; None: all
    rows: torch.Tensor,  # [requests] int64, request rows; -1 for padding
    most: torch.Tensor,  # [requests] float32, drafts that the request may use
    stand_in: int,  # token ID in place of an INVALID draft
    draft_tokens: torch.Tensor,  # [at least requests, at least n] int64, output
    invalid: torch.Tensor,  # [1] int64, the counter of requests with invalid drafts
) -> None:
    """Replace INVALID drafts by a stand-in, so that vLLM can embed and verify every draft.

    The stand-in is verified like any other draft, so nothing needs to be masked.
    """
    requests, made = token_ids.shape
    wanted = torch.full_like(rows, made) if counts is None else counts.clamp(max=made)
    valid = (token_ids >= 0).cumprod(dim=1)
    usable = torch.minimum(wanted, most.long())
    invalid += ((rows >= 0) & (valid.sum(dim=1) < usable)).sum()
    draft_tokens[:requests, :made] = torch.where(token_ids < 0, stand_in, token_ids)
