# SPDX-License-Identifier: Apache-2.0
"""Positions of answers, each with two states and the tokens after it, for learning.

A position t of an answer is one whose state gave a token of it. It is complete when
K + 1 tokens after it are known. Until then its state is kept by request row.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm_ppd.kernels.lookup import Texts


class Verified(NamedTuple):
    """A verified step, whose tokens are not in the texts yet."""

    rows: Tensor  # [requests] int32, request rows
    # [at least requests + 1] int32, where each request's tokens begin
    query_starts: Tensor
    num_sampled: Tensor  # [requests] int32, tokens that each emitted
    # [requests] int32, scheduled tokens after the last accepted token
    num_rejected: Tensor
    positions: Tensor  # [tokens] int64
    hidden: Tensor  # [tokens, hidden] normed states


class Kept(NamedTuple):
    """What is kept of the answers. All of it is written, except for holds_out."""

    # [request rows, WINDOWS (K + 1), hidden], by position
    recent: Tensor
    first: Tensor  # [request rows] int64, the first position that is not complete
    # [request rows] int64, 1 where positions may be held out
    holds_out: Tensor
    # [2] int64, positions that went to the ring, and that are held out, so far
    counts: Tensor
    # The complete positions: a ring, then those that are held out
    states: Tensor  # [positions, 2, hidden], of t and t + 1
    tokens: Tensor  # [positions, K + 1] int64, the tokens after t


# A step moves positions of the last two steps to the complete ones, and keeps another
# K + 1. None of the latter replaces one of the former.
WINDOWS = 3


def collect(step: Verified, texts: Texts, kept: Kept, held: int) -> None:
    """Move complete positions of the step's requests, in their order, and keep its
    states.

    Args:
        step: verified.
        texts: of all requests.
        kept: so far.
        held: most positions that are held out.
    """
    window = kept.recent.shape[1]
    following = np.arange(kept.tokens.shape[1])
    rows = step.rows.numpy()
    first = kept.first.numpy()
    counts = kept.counts.numpy()

    known = texts.lengths.numpy()[rows] - len(following) - first[rows]
    request, place = np.nonzero(following < known[:, None])
    row = rows[request]
    position = first[row] + place
    may = kept.holds_out.numpy()[row] > 0
    held_at = counts[1] + may.cumsum() - 1
    held_out = may & (held_at < held)
    ring = len(kept.tokens) - held
    in_ring = (counts[0] + (~held_out).cumsum() - 1) % ring
    slots = np.where(held_out, ring + held_at, in_ring)
    counts += (~held_out).sum(), held_out.sum()
    np.add.at(first, row, 1)
    row = row[:, None]
    both = (position[:, None] + [0, 1]) % window
    kept.states[slots] = kept.recent[row, both]
    ahead = position[:, None] + 1 + following
    kept.tokens.numpy()[slots] = texts.token_ids.numpy()[row, ahead]

    emitted = following < step.num_sampled.numpy()[:, None]
    request, back = np.nonzero(emitted)
    ends = step.query_starts.numpy()[1:] - 1
    place = ends[request] - step.num_rejected.numpy()[request] - back
    position = step.positions.numpy()[place]
    kept.recent[rows[request], position % window] = step.hidden[place]
