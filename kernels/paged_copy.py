# SPDX-License-Identifier: Apache-2.0
"""Copies inside vLLM's paged KV caches: single tokens' entries, and whole blocks.

The worker group's k lanes of a request share its blocks but for the last, of which each lane has its own; the entry
of the lane that matched is copied into the others (PPD, section 3, with k candidates). Layers' caches are vLLM's,
logically [blocks, KV heads, block size, content] with any strides; a token's keys and values stand side by side in the
content. A slot is block * block size + offset, as in vLLM's slot mappings; pairs with a negative slot are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def copy_slots(
    kv_caches: Sequence[torch.Tensor],  # [blocks, KV heads, block size, content] of each layer
    source_slots: torch.Tensor,  # [pairs] int64
    target_slots: torch.Tensor,  # [pairs] int64, no two alike, none of them a source
    places: torch.Tensor | None = None,  # [block size, numbers] int64, from entry_places
) -> None:
    """Copy tokens' keys and values from slot to slot, in place, in every layer.

    Args:
        kv_caches: caches of one KV cache group.
        source_slots: where to read.
        target_slots: where to write.
        places: of each offset the numbers that are its own in a flattened block, for backends that do not keep a
            block in the order of its shape (vLLM's CPU attention); None for all others.
    """
    valid = (source_slots >= 0) & (target_slots >= 0)
    source_slots, target_slots = source_slots[valid], target_slots[valid]
    for cache in kv_caches:
        size = cache.shape[2]
        source, source_offset = source_slots // size, source_slots % size
        target, target_offset = target_slots // size, target_slots % size
        if places is None:
            cache[target, :, target_offset] = cache[source, :, source_offset]
        else:
            pages = cache.view(len(cache), -1)
            pages[target[:, None], places[target_offset]] = pages[source[:, None], places[source_offset]]


def copy_blocks(
    kv_caches: Sequence[torch.Tensor],  # [blocks, KV heads, block size, content] of each layer
    source_blocks: torch.Tensor,  # [pairs] int64
    target_blocks: torch.Tensor,  # [pairs] int64, no two alike, none of them a source
) -> None:
    """Copy whole blocks, in place, in every layer; right for any order inside a block."""
    valid = (source_blocks >= 0) & (target_blocks >= 0)
    source_blocks, target_blocks = source_blocks[valid], target_blocks[valid]
    for cache in kv_caches:
        cache[target_blocks] = cache[source_blocks]


def entry_places(
    write: Callable[[torch.Tensor, int], None],  # (cache, slot): writes ones as that slot's key and value
    kv_cache: torch.Tensor,  # [blocks, KV heads, block size, content], taken for its shape and type alone
) -> torch.Tensor:
    """Where a backend keeps each offset of a block: [block size, numbers] int64 into the flattened block.

    Found by letting the backend write. The places ascend; that the i-th of one offset means what the i-th of another
    does holds for every order of vLLM's CPU attention (keys transposed, keys in pairs, values in pairs of tokens).

    Raises:
        ValueError: if the offsets do not divide the block among them.
    """
    found = []
    for offset in range(kv_cache.shape[2]):
        block = torch.zeros(1, *kv_cache.shape[1:], dtype=kv_cache.dtype)
        write(block, offset)
        found.append(block.flatten().nonzero().squeeze(1))
    numbers = kv_cache[0].numel()
    alike = all(len(places) == len(found[0]) for places in found)
    if not alike or sorted(torch.cat(found).tolist()) != list(range(numbers)):
        raise ValueError(f"the backend's entries do not divide a block of {numbers} numbers; copy whole blocks instead")
    return torch.stack(found)
