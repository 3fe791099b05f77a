# SPDX-License-Identifier: Apache-2.0
"""Our own counters at /metrics, under `ppd:`, beside vLLM's `vllm:spec_decode_...`.

The counting happens in the worker, the scraping in the front end, and vLLM's statistics carry no field of a plugin
between them. A page of shared memory does: one row of float64 an engine (data-parallel rank), one column a counter. It
is anonymous and belongs to the front end, so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.vllm_ppd")

COUNTERS = {
    "deferred_steps": "Engine steps that ran the deep pass alone, from saved states.",
    "fallback_steps": "Engine steps that ran the full forward.",
    "confidence_stops": "Times a request stopped drafting because its confidence was not over gamma.",
    "unverified_tokens": "Tokens emitted without verification (method dynamo with verify: false).",
    "drafting_seconds": "Seconds spent in drafting (shallow passes, early heads and their host work).",
}
PATH_VARIABLE = "PPD_COUNTERS_FILE"
_published: list[np.ndarray] = []


def publish(parallel_config: Any) -> None:
    """Create the counters of the engine about to start and register them with this process's Prometheus registry.

    Where they are travels to the workers in the environment: vLLM's configuration is hashed for its compilation cache,
    which must not miss because of it.
    """
    os.environ.pop(PATH_VARIABLE, None)
    if not hasattr(os, "memfd_create"):
        logger.info("vllm-ppd: no shared memory of the needed kind on this system, ppd: counters are off")
        return
    engines = max(1, parallel_config.data_parallel_size)
    size = 8 * engines * len(COUNTERS)
    descriptor = os.memfd_create("vllm-ppd-counters")
    os.ftruncate(descriptor, size)
    table = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.float64).reshape(engines, len(COUNTERS))
    if not _published:
        from prometheus_client import REGISTRY

        REGISTRY.register(_Collector())
    _published.append(table)
    os.environ[PATH_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"


class Counters:
    """The worker's side; only the first rank of an engine writes."""

    def __init__(self, parallel_config: Any) -> None:
        self._column = {name: column for column, name in enumerate(COUNTERS)}
        self.values = np.zeros(len(COUNTERS))
        path = os.environ.get(PATH_VARIABLE)
        if path is None or parallel_config.rank % parallel_config.world_size != 0:
            return
        try:
            rows = np.memmap(path, dtype=np.float64, mode="r+").reshape(-1, len(COUNTERS))
            self.values = rows[parallel_config.data_parallel_index]
        except (OSError, ValueError, IndexError) as error:
            # A worker on another machine: drafting works, its counters are not seen.
            logger.warning("vllm-ppd: counters are not published (%s)", error)

    def add(self, name: str, amount: float = 1) -> None:
        self.values[self._column[name]] += amount


class _Collector:
    """Reads the counters when Prometheus scrapes; engines of one process are added up by rank."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for column, (name, text) in enumerate(COUNTERS.items()):
            family = CounterMetricFamily(f"ppd:{name}", text, labels=["engine"])
            for engine in range(max(map(len, _published), default=0)):
                total = sum(float(table[engine, column]) for table in _published if engine < len(table))
                family.add_metric([str(engine)], total)
            yield family
