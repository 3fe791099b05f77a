# SPDX-License-Identifier: Apache-2.0
"""The kernel of structured_outputs.py."""

from typing import Any

import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import unpacked


def apply_grammar_bitmask(
    logits: torch.Tensor,  # [logits, V], changed in place
    logits_stride: int,
    # [masks] request x MASK_STRIDE + index among its rows of logits
    mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,  # [requests + 1]
    # [masks, V / 32] int32, a bit a token: whether the grammar allows it
    bitmask: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int = 1,
    **launch: Any,
) -> None:
    """Drop the tokens that a grammar does not allow.

    A mask for a row that the step does not have is left out.
    """
    first_rows = cu_num_logits.tolist()
    for mask, place in enumerate(mapping.tolist()):
        request, local = divmod(place, MASK_STRIDE)
        row = first_rows[request] + local
        if row < first_rows[request + 1]:
            allowed = unpacked(bitmask[mask], vocab_size)
            logits[row, :vocab_size].masked_fill_(
                torch.from_numpy(~allowed), float("-inf")
            )
