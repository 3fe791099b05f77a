# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine: huge pages for engines, free memory, and peak memory of processes."""

import contextlib
from pathlib import Path

import psutil
import torch

HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # read by torch
    # For matrices that vLLM packs: separate memory for each, never reused.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}  # engine core in the caller


def huge_pages() -> dict[str, str]:
    """Environment variables for a process that computes on the CPU; empty if there is a GPU.

    With small pages the same product takes up to a tenth longer in one process than in another, depending on the memory
    that each happened to get.
    """
    return {} if torch.cuda.is_available() else HUGE_PAGES


def free_bytes() -> int:
    """Bytes that further engines could take."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else int(psutil.virtual_memory().available)


def peak_bytes(process: int | None = None) -> int:
    """The most bytes ever held: on the GPU of this process, else resident, including its children."""
    if process is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    leader = psutil.Process(process)
    return sum(map(_peak_resident, [leader.pid, *(child.pid for child in leader.children(recursive=True))]))


def _peak_resident(process: int) -> int:
    """Linux's high-water mark, which psutil does not report; 0 elsewhere and for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
