# SPDX-License-Identifier: Apache-2.0
"""What some engine steps ask of CUDA's runtime and driver, by torch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

COLUMNS = ("launches", "copies", "graphs", "nodes", "waits")


def of_steps(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Calls of a step, the mean of some, by COLUMNS, and the microseconds of this thread's CPU time, their median.

    Nodes are those of the graphs that were launched: kernels and copies that the host does not launch.
    """
    seconds, activities = [], torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        for _ in range(steps):
            started = time.thread_time()
            step()
            seconds.append(time.thread_time() - started)
    totals = by_kind(Counter({event.key: event.count for event in profile.key_averages()}))
    calls = {name: round(count / steps, 1) for name, count in totals.items()}
    return calls | {"host microseconds": round(1e6 * sorted(seconds)[len(seconds) // 2])}


def by_kind(calls: Counter[str]) -> dict[str, int]:
    """The profiler's events by COLUMNS: calls of CUDA's runtime and driver, and what ran on the device."""
    kinds = dict.fromkeys(COLUMNS, 0)
    on_device = 0
    for name, count in calls.items():
        if "GraphLaunch" in name:
            kinds["graphs"] += count
        elif "LaunchKernel" in name:
            kinds["launches"] += count
        elif "Synchronize" in name or name == "cudaMemcpy":  # cudaMemcpyAsync does not wait by itself
            kinds["waits"] += count
        elif name.startswith("cudaMemcpy"):
            kinds["copies"] += count
        elif not name.startswith(("cuda", "cu", "aten::", "Memset")):
            on_device += count
    # What ran and the host did not ask for was in a graph.
    return kinds | {"nodes": max(0, on_device - kinds["launches"] - kinds["copies"])}
