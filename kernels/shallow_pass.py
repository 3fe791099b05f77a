# SPDX-License-Identifier: Apache-2.0
"""Inputs of a pass of one token per request, written into fixed buffers from the previous draft."""

from typing import NamedTuple

import torch


class PassInputs(NamedTuple):
    """One token per request; every field is [requests]."""

    input_ids: torch.Tensor  # int32, as in vLLM
    positions: torch.Tensor  # int64, within the model's length
    seq_lens: torch.Tensor  # int32
    writing: torch.Tensor  # int64, request rows that write KV; -1 where none is to be written


def begin_pass(
    rows: torch.Tensor,  # [requests] int64, request rows; -1 for padding
    base: torch.Tensor,  # [requests] int64, positions of the newest tokens
    token_ids: torch.Tensor,  # [requests] int64; INVALID ones run as token 0
    offset: int,  # distance of the tokens from the newest tokens
    most: int,  # the model's length, past which nothing is written
    inputs: PassInputs,
) -> None:
    """Write the inputs of a pass over the tokens that are `offset` places after the newest tokens."""
    requests = len(rows)
    wanted = torch.where(rows < 0, 0, base + offset)
    positions = wanted.clamp(max=most - 1)
    inputs.input_ids[:requests] = token_ids.clamp(min=0)
    inputs.positions[:requests] = positions
    inputs.seq_lens[:requests] = positions + 1
    inputs.writing[:requests] = torch.where(wanted < most, rows, -1)
