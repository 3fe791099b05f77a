# SPDX-License-Identifier: Apache-2.0
"""Weights in huge pages, so that engines of one machine are equally fast.

With small pages the same products take up to a tenth longer in one process than in another, by the memory that each
happened to get, for as long as it lives (seen: the engine that was started first).
"""

from __future__ import annotations

import torch

HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's own
    # What vLLM packs: memory of its own for each matrix, and none that was another's before.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000",
}


def huge_pages() -> dict[str, str]:
    """The environment in which a process that computes on the CPU starts; nothing where there is a GPU."""
    return {} if torch.cuda.is_available() else HUGE_PAGES
