# SPDX-License-Identifier: Apache-2.0
"""The end of a draft on the device: token IDs that the next step embeds, counts, and q(x) by request row."""

from __future__ import annotations

import torch

from vllm_ppd.kernels.sampling import is_greedy

INVALID_DRAFTS, CONFIDENCE_STOPS = range(2)  # places in the counts


def finish(
    token_ids: torch.Tensor,  # [requests, n] int64; INVALID where a draft was taken from no distribution
    counts: torch.Tensor | None,  # [requests] int64, drafts that the method stands for; None: all
    rows: torch.Tensor,  # [requests] int64, request rows; -1 for padding
    most: torch.Tensor,  # [requests] float32, drafts that the request may use
    stand_in: int,  # token ID in place of an INVALID draft
    draft_tokens: torch.Tensor,  # [at least requests, at least n] int64, is written
    confidence: tuple[torch.Tensor, torch.Tensor] | None,  # each draft's [requests, n] float32, and where it is written
    counted: torch.Tensor,  # [2] int64: requests with invalid drafts, and those that stopped; is added to
) -> None:
    """Make drafts what vLLM embeds and verifies: some token everywhere.

    An INVALID draft's stand-in is verified as any draft is, against a q(x) that is one-hot (store_q), so that nothing
    needs to be masked. The confidence of what its request may not use, or its method does not stand for, is 0.
    """
    requests, made = token_ids.shape
    wanted = torch.full_like(rows, made) if counts is None else counts.clamp(max=made)
    valid = (token_ids >= 0).cumprod(dim=1)
    allowed = most.long().clamp(max=made)
    real, usable = rows >= 0, torch.minimum(wanted, allowed)
    counted[INVALID_DRAFTS] += (real & (valid.sum(dim=1) < usable)).sum()
    counted[CONFIDENCE_STOPS] += (real & (wanted < allowed)).sum()
    draft_tokens[:requests, :made] = torch.where(token_ids < 0, stand_in, token_ids)
    if confidence is not None:
        known, out = confidence
        counting = (torch.arange(made, device=rows.device) < usable[:, None]) & (valid > 0)
        out[:requests, :made] = torch.where(counting, known, 0.0)


def store_q(
    q: torch.Tensor,  # [requests, n, entries] float32, what each draft was drawn from
    token_ids: torch.Tensor,  # [requests, n] int64; INVALID where q is no distribution
    rows: torch.Tensor,  # [requests] int64, request rows; -1 for padding, which the last row of the store takes
    heat: torch.Tensor,  # [requests] float32, temperatures at which drafts were drawn
    temperature: torch.Tensor | None,  # [requests] float32; None: probabilities are stored as they are
    columns: torch.Tensor | None,  # [entries] int64, the store's column of each entry; None: the same
    stand_in: int,  # token ID in place of an INVALID draft
    store: torch.Tensor,  # [request rows + 1, at least n, vocabulary] float32, is written
) -> None:
    """Store q(x) by request row: probabilities, or T log q(x), which a sampler divides by T before its softmax.

    q(x) is one-hot where the best token was taken, and at the stand-in of an INVALID draft.
    """
    made = q.shape[1]
    places = torch.arange(q.shape[-1], device=q.device) if columns is None else columns
    invalid = token_ids < 0
    one_hot = places == torch.where(invalid, stand_in, token_ids)[..., None]
    q = torch.where((invalid | is_greedy(heat)[:, None])[..., None], one_hot.to(q.dtype), q)
    if temperature is not None:
        q = q.log() * torch.where(is_greedy(temperature), 1.0, temperature)[:, None, None]
    if columns is None:
        store[rows, :made] = q
    else:
        store[rows[:, None, None], torch.arange(made, device=q.device)[:, None], columns] = q
