# SPDX-License-Identifier: Apache-2.0
"""Copies inside vLLM's paged KV caches: of whole blocks, or of single tokens.

The worker group's k candidates for a request share its blocks except the last, which is
separate for each candidate; the last block of the candidate that matched is copied over
the others (PPD, section 3). A backend may store the tokens of a block in any order. On
a CPU, whose blocks are large, copying one token's entry is far cheaper than its block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def copy_blocks(
    kv_caches: Sequence[Tensor],  # [blocks, ...] of each layer, any strides
    source_blocks: Tensor,  # [pairs] int64
    target_blocks: Tensor,  # [pairs] int64; distinct, and none of them a source
) -> None:
    """Copy blocks, in place, in every layer."""
    for cache in kv_caches:
        cache.index_copy_(0, target_blocks, cache.index_select(0, source_blocks))


def copy_entries(
    kv_caches: Sequence[
        Tensor
    ],  # [blocks, KV heads, block size, content] of each layer
    # [pairs] int64, block * block size + offset, as in vLLM's slot mappings
    source_slots: Tensor,
    target_slots: Tensor,  # [pairs] int64; distinct, and none of them a source
    places: Tensor,  # [block size, numbers] int64, from entry_places
) -> None:
    """Copy tokens' keys and values from slot to slot, in place, in every layer."""
    size = len(places)
    sources = (source_slots // size)[:, None]
    source_places = places[source_slots % size]
    targets = (target_slots // size)[:, None]
    target_places = places[target_slots % size]
    for cache in kv_caches:
        blocks = cache.view(len(cache), -1)
        blocks[targets, target_places] = blocks[sources, source_places]


def entry_places(
    write: Callable[[Tensor, int, Tensor], None],
    kv_cache: Tensor,
) -> Tensor:
    """Find where a backend stores each offset of a block.

    The backend writes each offset of an empty block. An offset's places ascend; in
    every order that vLLM's CPU attention uses, the i-th place has the same meaning for
    all offsets.

    Args:
        write: of (cache, slot, numbers [2 * KV heads * head size]): a slot's numbers
            are its key for all heads, and then its value.
        kv_cache: [blocks, KV heads, block size, content], whose shape and type are used
            alone.

    Returns:
        [block size, numbers] int64, indices into the flattened block.

    Raises:
        ValueError: if the offsets do not divide the block among them.
    """
    size = kv_cache.shape[2]
    numbers = kv_cache[0].numel()
    places_of = []
    for offset in range(size):
        block = torch.zeros(1, *kv_cache.shape[1:], dtype=kv_cache.dtype)
        write(block, offset, torch.ones(numbers // size))
        places_of.append(block.flatten().nonzero().squeeze(1))
    alike = all(len(places) == len(places_of[0]) for places in places_of)
    if not alike or sorted(torch.cat(places_of).tolist()) != list(range(numbers)):
        raise ValueError(
            f"the backend's entries do not divide a block of {numbers} numbers; copy "
            "whole blocks instead"
        )
    return torch.stack(places_of)
