# SPDX-License-Identifier: Apache-2.0
"""Drafting's inputs from a step that has just been verified, gathered into fixed
buffers.

The drafts' CUDA graphs read the inputs there, so a decode step launches only this
before it replays a graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepEnd(NamedTuple):
    """A verified step as vLLM's runner V2 leaves it, with a place for each request of the batch."""

    rows: Tensor  # [requests] int32, request rows
    # [at least requests + 1] int32, where each request's tokens begin
    query_starts: Tensor
    # [requests] int32, tokens that each emitted; 0 within a prompt
    num_sampled: Tensor
    # [requests] int32, scheduled tokens after the last accepted token
    num_rejected: Tensor
    # [request rows, 1] int64, the last token that each emitted
    last_sampled: Tensor
    positions: Tensor  # [tokens] int64
    hidden: Tensor  # [tokens, hidden] normed states
    seeds: Tensor  # [request rows] int64


class Staged(NamedTuple):
    """The buffers, with a place for each request up to their size."""

    rows: Tensor  # [requests] int64, request rows; -1 for padding
    newest_ids: Tensor  # [requests] int64, the last token that each emitted
    # [requests] int64, the step's token whose state gave the newest token
    places: Tensor
    positions: Tensor  # [requests] int64, of the newest token; 0 for padding
    hidden: Tensor  # [requests, hidden]
    settings: Tensor  # [settings, requests] float32
    seeds: Tensor  # [requests] int64


def stage(end: StepEnd, settings: Tensor, staged: Staged, padded: int) -> None:
    """Gather the drafting inputs of the step's requests, and mark the padding after
    them.

    A prefill chunk that does not end its prompt sampled nothing, so it counts as
    padding.

    Args:
        end: the step.
        settings: [request rows + 1, settings] float32, by request row.
        staged: buffers, of which the first `padded` places are written.
        padded: number of places, at least the step's requests.
    """
    requests = len(end.rows)
    rows = end.rows.long()
    places = end.query_starts[1 : requests + 1].long() - 1 - end.num_rejected
    staged.rows[requests:padded] = -1
    sampled = end.num_sampled > 0
    staged.rows[:requests] = torch.where(sampled, rows, -1)
    staged.newest_ids[:requests] = end.last_sampled[rows, 0]
    staged.places[:requests] = places
    staged.positions[requests:padded] = 0
    staged.positions[:requests] = (end.positions[places] + 1) * sampled
    torch.index_select(end.hidden, 0, places, out=staged.hidden[:requests])
    staged.settings[:, :requests] = settings[rows].T
    staged.seeds[:requests] = end.seeds[rows]
