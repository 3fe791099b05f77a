# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks inside vLLM's paged KV caches in one launch for all layers and blocks.

torch needs a gather and a scatter per layer. Here, a table holds the layers' addresses, and each program moves a part
of one block in one layer. In every vLLM layout with layers and blocks outermost, a block is one run of bytes, whatever
the order of heads and tokens inside it. The kernel moves bit patterns, as wide as the addresses allow, so it also
copies fp8 caches and per-token scales, and leaves NaNs unchanged.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import paged_copy

BLOCK = 1024  # numbers per program
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy(
    caches: tl.tensor,  # [layers] int64 addresses
    like: tl.tensor,  # a tensor of the numbers' type
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    numbers: tl.tensor,  # per block
    step_block: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    source = tl.load(source_blocks + tl.program_id(0))
    target = tl.load(target_blocks + tl.program_id(0))
    cache = tl.load(caches + tl.program_id(1)).to(like.dtype)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wanted = place < tl.where(tl.minimum(source, target) >= 0, numbers, 0)
    values = tl.load(cache + source * step_block + place, mask=wanted)
    tl.store(cache + target * step_block + place, values, mask=wanted)


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The layers' addresses on their device; the caches do not move while an engine lives."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _likes(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=INTEGERS[size], device=device)


def _contiguous(kv_caches: Sequence[torch.Tensor]) -> bool:
    """Whether the blocks of every layer are contiguous, and all layers have the same layout."""
    first = kv_caches[0]
    if len({(cache.dtype, cache.shape[1:], cache.stride()) for cache in kv_caches}) > 1:
        return False
    length = 1
    for stride, size in sorted(zip(first.stride()[1:], first.shape[1:], strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return first.dim() > 1 and 0 < length <= first.stride(0)


def copy_blocks(kv_caches: Sequence[torch.Tensor], source_blocks: torch.Tensor, target_blocks: torch.Tensor) -> None:
    """Same as the reference, which runs if layers differ or blocks are not contiguous."""
    if len(kv_caches) == 0 or len(source_blocks) == 0:
        return
    if not _contiguous(kv_caches):
        paged_copy.copy_blocks(kv_caches, source_blocks, target_blocks)
        return
    first = kv_caches[0]
    size = first.element_size()
    run, step = first[0].numel() * size, first.stride(0) * size
    addresses = tuple(cache.data_ptr() for cache in kv_caches)
    wide = gcd(8, run, step, *addresses)
    grid = (len(source_blocks), len(kv_caches), triton.cdiv(run // wide, BLOCK))
    _copy[grid](
        _table(addresses, first.device),
        _likes(wide, first.device),
        source_blocks.contiguous(),
        target_blocks.contiguous(),
        run // wide,
        step // wide,
        BLOCK=BLOCK,
    )
