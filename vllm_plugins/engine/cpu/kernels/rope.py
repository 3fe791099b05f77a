# SPDX-License-Identifier: Apache-2.0
"""The kernel of mm/rope.py: positions in several dimensions (M-RoPE)."""

from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import spans


def prepare_rope_positions(
    positions: torch.Tensor,  # [NUM_DIMS, tokens or more] int64
    positions_stride: int,
    prefill_positions: torch.Tensor,  # [request rows x NUM_DIMS, max_model_len]
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    # [request rows] between a text's length and the next position
    prefill_deltas: torch.Tensor,
    rows: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    prefill_lens: torch.Tensor,  # [request rows]
    num_computed: torch.Tensor,  # [request rows]
    NUM_DIMS: int = 3,
    **launch: Any,
) -> None:
    """Positions of a step's tokens: a prompt's are given. After it all dimensions go on alike."""
    rows_np = rows.numpy()
    starts = query_start_loc.numpy()[: len(rows_np) + 1]
    computed = num_computed.numpy()[rows_np]
    deltas = prefill_deltas.numpy()[rows_np]
    output = positions.numpy()
    owners, offsets = spans(np.diff(starts))
    output[:NUM_DIMS, starts[0] : starts[-1]] = (computed + deltas)[owners] + offsets
    given = prefill_positions.numpy()
    for request in np.flatnonzero(computed < prefill_lens.numpy()[rows_np]).tolist():
        start = starts[request]
        end = starts[request + 1]
        first_row = rows_np[request] * NUM_DIMS
        begin = computed[request]
        prompt = given[first_row : first_row + NUM_DIMS, begin : begin + end - start]
        output[:NUM_DIMS, start : start + prompt.shape[1]] = prompt
