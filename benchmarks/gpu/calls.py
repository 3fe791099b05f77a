# SPDX-License-Identifier: Apache-2.0
"""Calls of CUDA's driver in some engine steps, counted by torch's profiler or by a driver that counts them itself.

The second is a stand-in for NVIDIA's driver on a machine without a GPU: memory and copies work, kernels compute
nothing, and `fake_counts`, an array of long, has the number of calls so far in the order of COUNTED.
"""

import ctypes
import time
from collections import Counter
from collections.abc import Callable

import torch

COUNTED = (
    "launches", "captured launches", "graphs", "copies", "captured copies", "fills", "captured fills", "event waits",
    "records", "waits of streams", "copies that wait", "queries", "stream waits", "nodes",
)  # fmt: skip
WAITS = ("event waits", "stream waits", "copies that wait")
COLUMNS = ("launches", "copies", "graphs", "nodes", "waits")


def of_steps(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Mean calls of a step by COLUMNS, and the median microseconds of this thread's CPU time.

    Nodes are the kernels and copies in the launched graphs, which the host does not launch one by one.
    """
    seconds = []

    def run() -> None:
        for _ in range(steps):
            started = time.thread_time()
            step()
            seconds.append(time.thread_time() - started)

    driver = counting_driver()
    if driver is None:
        totals = _profiled(run)
    else:
        before = list(driver)
        run()
        made = dict(
            zip(COUNTED, (after - earlier for after, earlier in zip(driver, before, strict=True)), strict=False)
        )
        totals = {name: made.get(name, 0) for name in COLUMNS[:-1]} | {"waits": sum(made[name] for name in WAITS)}
    calls = {name: round(count / steps, 1) for name, count in totals.items()}
    return calls | {"host microseconds": round(1e6 * sorted(seconds)[len(seconds) // 2])}


def counting_driver() -> ctypes.Array[ctypes.c_long] | None:
    """The calls so far of a counting driver; None if the driver is NVIDIA's."""
    try:
        return (ctypes.c_long * 32).in_dll(ctypes.CDLL("libcuda.so.1"), "fake_counts")
    except (OSError, ValueError):
        return None


def _profiled(run: Callable[[], None]) -> dict[str, int]:
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        run()
    return by_kind(Counter({event.key: event.count for event in profile.key_averages()}))


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
