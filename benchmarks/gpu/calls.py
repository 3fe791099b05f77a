# SPDX-License-Identifier: Apache-2.0
"""Calls of CUDA's runtime and driver in some engine steps, counted by torch's profiler."""

import time
from collections import Counter
from collections.abc import Callable

import torch

COLUMNS = ("launches", "copies", "graphs", "nodes", "waits")


def of_steps(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Mean calls of a step by COLUMNS, and the median microseconds of this thread's CPU time.

    Nodes are the kernels and copies in the launched graphs, which the host does not launch one by one.
    """
    seconds = []
    activities = torch.profiler.ProfilerActivity
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
    # What the host did not launch ran in a graph.
    return kinds | {"nodes": max(0, on_device - kinds["launches"] - kinds["copies"])}
