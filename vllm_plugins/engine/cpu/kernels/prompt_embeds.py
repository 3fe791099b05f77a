# SPDX-License-Identifier: Apache-2.0
"""The kernel of model_states/prompt_embeds.py."""

import ctypes
from typing import Any

import numpy as np
import torch


def apply_prompt_embeds(
    inputs_embeds: torch.Tensor,  # [tokens, hidden_size], changed in place
    inputs_embeds_stride: int,
    # [request rows] uint64, addresses of [embeds_lens, hidden_size]
    embeds_pointers: torch.Tensor,
    # [request rows] uint64, addresses of [embeds_lens] bytes, or 0
    mask_pointers: torch.Tensor,
    embeds_lens: torch.Tensor,  # [request rows]; 0: the request has none
    rows: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    num_computed: torch.Tensor,  # [request rows]
    hidden_size: int,
    **launch: Any,
) -> None:
    """Copy the embeddings that a user gave as a prompt, except where a mask says token ID."""
    element = inputs_embeds.element_size()
    row_bytes = hidden_size * element
    starts = query_start_loc.tolist()
    for request, row in enumerate(rows.tolist()):
        begin = int(num_computed[row])
        length = int(embeds_lens[row])
        number = min(starts[request + 1] - starts[request], length - begin)
        if number <= 0:
            continue
        mask_pointer = int(mask_pointers[row])
        is_token_id = np.zeros(number, dtype=np.uint8)
        if mask_pointer:
            memory = (ctypes.c_uint8 * length).from_address(mask_pointer)
            is_token_id = np.ctypeslib.as_array(memory)[begin : begin + number]
        source = int(embeds_pointers[row]) + begin * row_bytes
        for token in np.flatnonzero(is_token_id == 0).tolist():
            target = inputs_embeds.data_ptr()
            target += (starts[request] + token) * inputs_embeds_stride * element
            ctypes.memmove(target, source + token * row_bytes, row_bytes)
