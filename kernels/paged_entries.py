# SPDX-License-Identifier: Apache-2.0
"""Copies of single tokens' entries inside vLLM's paged KV caches, for backends with their own order within a block.

vLLM's CPU attention does (keys transposed or in pairs, values in pairs of tokens), and its blocks are large, so that
copying one token's entry is far cheaper than copying its block (paged_copy.py). A slot is block * block size + offset,
as in vLLM's slot mappings.
"""

from collections.abc import Callable, Sequence

import torch


def copy_entries(
    kv_caches: Sequence[torch.Tensor],  # [blocks, KV heads, block size, content] of each layer, contiguous
    source_slots: torch.Tensor,  # [pairs] int64
    target_slots: torch.Tensor,  # [pairs] int64, no two alike, none of them a source
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
    kv_cache: torch.Tensor,  # [blocks, KV heads, block size, content], taken for its shape and type alone
) -> torch.Tensor:
    """The places of each offset in a backend's block: [block size, numbers] int64 into the flattened block.

    They are found by letting the backend write: numbers are a slot's key, for all heads, and then its value.
    An offset's places ascend; that the i-th of one offset means what the i-th of another does holds for every order of
    vLLM's CPU attention.

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
