# SPDX-License-Identifier: Apache-2.0
"""Copies of whole blocks inside vLLM's paged KV caches.

The worker group's k candidates for a request share its blocks except the last, which is separate for each candidate;
the last block of the candidate that matched is copied over the others (PPD, section 3). Whole blocks are copied, since
a backend may store the tokens of a block in any order (as vLLM's CPU attention does).
"""

from collections.abc import Sequence

import torch


def copy_blocks(
    kv_caches: Sequence[torch.Tensor],  # [blocks, ...] of each layer, any strides
    source_blocks: torch.Tensor,  # [pairs] int64; a negative number skips the pair
    target_blocks: torch.Tensor,  # [pairs] int64, likewise; distinct, and none of them a source
) -> None:
    """Copy blocks, in place, in every layer."""
    valid = (source_blocks >= 0) & (target_blocks >= 0)
    source_blocks, target_blocks = source_blocks[valid], target_blocks[valid]
    for cache in kv_caches:
        cache.index_copy_(0, target_blocks, cache.index_select(0, source_blocks))
