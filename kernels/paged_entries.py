# SPDX-License-Identifier: Apache-2.0
"""Copies of single tokens' entries inside vLLM's paged KV caches, for backends that permute a block.

vLLM's CPU attention does so (keys transposed or in pairs, values in pairs of tokens), and its blocks are large, so
copying one token's entry is far cheaper than copying its block (paged_copy.py). A slot is block * block size + offset,
as in vLLM's slot mappings.
"""

from collections.abc import Callable, Sequence

import torch


def copy_entries(
    kv_caches: Sequence[torch.Tensor],  # [blocks, KV heads, block size, content] of each layer, contiguous
    source_slots: torch.Tensor,  # [pairs] int64
    target_slots: torch.Tensor,  # [pairs] int64; distinct, and none of them a source
    places: torch.Tensor,  # [block size, numbers] int64, from entry_places
) -> None:
    """Copy tokens' keys and values from slot to slot, in place, in every layer."""
    size = len(places)
    sources, source_places = (source_slots // size)[:, None], places[source_slots % size]
    targets, target_places = (target_slots // size)[:, None], places[target_slots % size]
    for cache in kv_caches:
        blocks = cache.view(len(cache), -1)
        blocks[targets, target_places] = blocks[sources, source_places]


def entry_places(
    write: Callable[[torch.Tensor, int, torch.Tensor], None],  # (cache, slot, numbers [2 * KV heads * head size])
    kv_cache: torch.Tensor,  # [blocks, KV heads, block size, content], used only for its shape and type
) -> torch.Tensor:
    """Find where a backend stores each offset of a block: [block size, numbers] int64 into the flattened block.

    The backend writes each offset of an empty block; a slot's numbers are its key for all heads, and then its value.
    An offset's places ascend; in every order that vLLM's CPU attention uses, the i-th place has the same meaning for
    all offsets.

    Raises:
        ValueError: if the offsets do not divide the block among them.
    """
    size, numbers = kv_cache.shape[2], kv_cache[0].numel()

    def written(offset: int) -> torch.Tensor:
        block = torch.zeros(1, *kv_cache.shape[1:], dtype=kv_cache.dtype)
        write(block, offset, torch.ones(numbers // size))
        return block.flatten().nonzero().squeeze(1)

    places_of = [written(offset) for offset in range(size)]
    alike = all(len(places) == len(places_of[0]) for places in places_of)
    if not alike or sorted(torch.cat(places_of).tolist()) != list(range(numbers)):
        raise ValueError(f"the backend's entries do not divide a block of {numbers} numbers; copy whole blocks instead")
    return torch.stack(places_of)
