# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/min_p.py, sample/trace_replay.py, sample/output.py and metrics/logits.py."""

from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import as_float32


def apply_min_p(
    logits: torch.Tensor,  # [logits, V] float32, changed in place
    logits_stride: int,
    rows: torch.Tensor,  # [logits]
    min_p: torch.Tensor,  # [request rows]
    vocab_size: int,
    **launch: Any,
) -> None:
    """Drop tokens less likely than a share of the likeliest's probability."""
    shares = min_p.numpy()[rows.numpy()]
    logits_np = logits.numpy()
    for row in np.flatnonzero(shares):
        values = logits_np[row]
        values[values < values.max() + np.log(shares[row])] = -np.inf


def replay_trace(
    sampled: torch.Tensor,  # [requests] int64, changed in place
    rows: torch.Tensor,  # [requests], -1: padding
    trace_token_ids: torch.Tensor,  # [request rows, max_model_len]
    trace_token_ids_stride: int,
    trace_lens: torch.Tensor,  # [request rows]
    total_lens: torch.Tensor,  # [request rows]
    prompt_lens: torch.Tensor,  # [request rows]
) -> None:
    """Put the tokens of requests' traces in place of the sampled ones."""
    places = np.flatnonzero(rows.numpy() >= 0)
    rows_np = rows.numpy()[places]
    steps = total_lens.numpy()[rows_np] - prompt_lens.numpy()[rows_np]
    traced = (steps >= 0) & (steps < trace_lens.numpy()[rows_np])
    tokens = trace_token_ids.numpy()[rows_np[traced], steps[traced]]
    sampled.numpy()[places[traced]] = tokens


def compact_sampling_mask(
    logits: torch.Tensor,  # [logits, V]
    logits_row_stride: int,
    logits_column_stride: int,
    cu_num_logits: torch.Tensor,  # [requests + 1]
    num_sampled: torch.Tensor,  # [requests]
    token_ids: torch.Tensor,  # [requests x ROWS_PER_REQUEST, max_num_kept] int32
    token_ids_stride: int,
    packed_mask: torch.Tensor,  # [requests x ROWS_PER_REQUEST, V / 8] uint8
    packed_mask_stride: int,
    counts: torch.Tensor,  # [requests x ROWS_PER_REQUEST] int32
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int = 1,
    **launch: Any,
) -> None:
    """The tokens that each sampled token was drawn from: first IDs, their number, and a
    bit each.
    """
    logits_np = as_float32(logits)
    first_rows = cu_num_logits.tolist()
    for request, number in enumerate(num_sampled.tolist()):
        for slot in range(ROWS_PER_REQUEST):
            output_row = request * ROWS_PER_REQUEST + slot
            if slot >= number:
                counts[output_row] = 0
                continue
            kept = np.isfinite(logits_np[first_rows[request] + slot])
            kept_ids = np.flatnonzero(kept)
            counts[output_row] = len(kept_ids)
            first_ids = kept_ids[:max_num_kept]
            token_ids.numpy()[output_row, : len(first_ids)] = first_ids
            packed_mask.numpy()[output_row] = np.packbits(kept, bitorder="little")


def count_nans(
    logits: torch.Tensor,  # [logits, V]
    logits_stride: int,
    num_nans: torch.Tensor,  # [logits] int32
    vocab_size: int,
    **launch: Any,
) -> None:
    num_nans.copy_(logits.isnan().sum(dim=-1))
