# SPDX-License-Identifier: Apache-2.0
"""The machine: memory in huge pages, free and held memory, and what a hypervisor takes of the processors' time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

Found = TypeVar("Found")

HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's own
    # What vLLM packs: memory of its own for each matrix, and none that was another's before.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}  # the engine core beside its caller
RETRIES = 3


def huge_pages() -> dict[str, str]:
    """Environment variables for a process that computes on the CPU; empty where there is a GPU.

    With small pages the same product takes up to a tenth longer in one process than in another, by the memory that each
    happened to get, for as long as it lives.
    """
    return {} if torch.cuda.is_available() else HUGE_PAGES


def restart_for_engines() -> None:
    """Start this command again with the environment that engines in this process need, unless it has it."""
    wanted = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), **huge_pages(), **IN_PROCESS}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def free_bytes() -> int:
    """Memory that further engines could take."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else int(psutil.virtual_memory().available)


def peak_bytes(process: int | None = None) -> int:
    """The most memory ever held: of the GPU that this process uses, else resident, with the process's children."""
    if process is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    leader = psutil.Process(process)
    return sum(map(_peak_resident, [leader.pid, *(child.pid for child in leader.children(recursive=True))]))


def _peak_resident(process: int) -> int:
    """Linux's high-water mark, which psutil does not report; 0 elsewhere, and for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


class Stolen:
    """Share of the processors' time that a hypervisor gives to other machines (Linux)."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def share(self) -> float:
        """Of the time since the last call."""
        now, before = self._seconds(), self._before
        self._before = now
        return (now[1] - before[1]) / max(now[0] - before[0], 1e-9)

    def _seconds(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        return sum(times[:8]), getattr(times, "steal", 0.0)  # a guest's time is in the user's


def undisturbed(most_stolen: float, run: Callable[[], Found | None]) -> Found | None:
    """What run() returns while other machines have no larger share of the time; None if that never happens.

    A run that returns None is repeated, too.
    """
    stolen = Stolen()
    for _ in range(1 + RETRIES):
        stolen.share()
        found = run()
        if stolen.share() <= most_stolen and found is not None:
            return found
    return None
