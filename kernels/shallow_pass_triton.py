# SPDX-License-Identifier: Apache-2.0
"""The inputs of a pass of one token per request in one launch, where torch needs ten."""

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels.shallow_pass import PassInputs

BLOCK = 128  # requests per program


@triton.jit(do_not_specialize=["requests", "offset"])
def _begin_pass(
    rows: tl.tensor,
    base: tl.tensor,
    token_ids: tl.tensor,
    inputs: PassInputs,
    offset: tl.tensor,
    most: tl.tensor,
    requests: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < requests
    row = tl.load(rows + place, mask=inside, other=-1)
    wanted = tl.where(row < 0, 0, tl.load(base + place, mask=inside, other=0) + offset)
    position = tl.minimum(wanted, most - 1)
    token = tl.load(token_ids + place, mask=inside, other=0)
    tl.store(inputs.input_ids + place, tl.maximum(token, 0).to(tl.int32), mask=inside)
    tl.store(inputs.positions + place, position, mask=inside)
    tl.store(inputs.seq_lens + place, (position + 1).to(tl.int32), mask=inside)
    tl.store(inputs.writing + place, tl.where(wanted < most, row, -1), mask=inside)


def begin_pass(
    rows: torch.Tensor, base: torch.Tensor, token_ids: torch.Tensor, offset: int, most: int, inputs: PassInputs
) -> None:
    """Same as the reference."""
    _begin_pass[(triton.cdiv(len(rows), BLOCK),)](
        rows, base, token_ids.contiguous(), inputs, offset, most, len(rows), BLOCK=BLOCK
    )
