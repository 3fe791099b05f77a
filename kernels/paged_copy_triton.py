# SPDX-License-Identifier: Apache-2.0
"""Copies inside vLLM's paged KV caches in one launch for all layers and tokens.

torch needs a gather and a scatter a layer; here the layers' addresses travel as a table and a program moves one token's
numbers in one layer, whatever the strides (NHD, HND, layers side by side in a block). Bit patterns are moved, so fp8
caches and per-token scales in the content come along, and NaN stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import paged_copy

BLOCK = 1024  # numbers a program
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy(
    caches: tl.tensor,  # [layers] int64 addresses
    like: tl.tensor,  # a tensor of the numbers' type
    source_slots: tl.tensor,
    target_slots: tl.tensor,
    block_size: tl.tensor,
    content: tl.tensor,
    numbers: tl.tensor,  # heads * content
    step_block: tl.tensor,
    step_head: tl.tensor,
    step_offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    source = tl.load(source_slots + tl.program_id(0))
    target = tl.load(target_slots + tl.program_id(0))
    cache = tl.load(caches + tl.program_id(1)).to(like.dtype)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wanted = place < tl.where(tl.minimum(source, target) >= 0, numbers, 0)
    inside = (place // content).to(tl.int64) * step_head + place % content
    read = (source // block_size) * step_block + (source % block_size) * step_offset
    write = (target // block_size) * step_block + (target % block_size) * step_offset
    tl.store(cache + write + inside, tl.load(cache + read + inside, mask=wanted), mask=wanted)


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The layers' addresses on their device; caches stay where they are as long as an engine lives."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _alike(kv_caches: Sequence[torch.Tensor]) -> bool:
    first = kv_caches[0]
    shapes = {(cache.dtype, cache.shape[1:], cache.stride()) for cache in kv_caches}
    return len(shapes) == 1 and first.stride(3) == 1


def copy_slots(
    kv_caches: Sequence[torch.Tensor],
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    places: torch.Tensor | None = None,
) -> None:
    """As the reference; layers of different shapes or strides, and an order by places, go through it."""
    if len(kv_caches) == 0 or len(source_slots) == 0:
        return
    if places is not None or not _alike(kv_caches):
        paged_copy.copy_slots(kv_caches, source_slots, target_slots, places)
        return
    first = kv_caches[0]
    _, heads, block_size, content = first.shape
    step_block, step_head, step_offset, _ = first.stride()
    grid = (len(source_slots), len(kv_caches), triton.cdiv(heads * content, BLOCK))
    _copy[grid](
        _table(tuple(cache.data_ptr() for cache in kv_caches), first.device),
        first.view(INTEGERS[first.element_size()]),
        source_slots.contiguous(),
        target_slots.contiguous(),
        block_size,
        content,
        heads * content,
        step_block,
        step_head,
        step_offset,
        BLOCK=BLOCK,
    )


def copy_blocks(kv_caches: Sequence[torch.Tensor], source_blocks: torch.Tensor, target_blocks: torch.Tensor) -> None:
    """As the reference: every slot of a block; layers of different shapes or strides go through the reference."""
    if len(kv_caches) == 0:
        return
    if not _alike(kv_caches):
        paged_copy.copy_blocks(kv_caches, source_blocks, target_blocks)
        return
    size = kv_caches[0].shape[2]
    # A negative block gives negative slots only.
    offsets = torch.arange(size, device=source_blocks.device)
    source, target = (blocks[:, None] * size + offsets for blocks in (source_blocks, target_blocks))
    copy_slots(kv_caches, source.flatten(), target.flatten())
