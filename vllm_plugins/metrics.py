# SPDX-License-Identifier: Apache-2.0
"""Our own counters at /metrics, under `ppd:`, beside vLLM's `vllm:spec_decode_...`.

The counting happens in the worker, the scraping in the front end, and vLLM's statistics carry no field of a plugin
between them. A small memory-mapped file does: one row of float64 an engine (data-parallel rank), one column a counter.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.vllm_ppd")

COUNTERS = {
    "deferred_steps": "Engine steps that ran the deep pass alone, from saved states.",
    "fallback_steps": "Engine steps that ran the full forward.",
    "confidence_stops": "Times a request stopped drafting because its confidence was not over gamma.",
    "drafting_seconds": "Seconds spent in drafting (shallow passes, early heads and their host work).",
}
PATH_VARIABLE = "PPD_COUNTERS_FILE"
_published: list[str] = []


def publish(parallel_config: Any) -> str:
    """Create the counters' file for the engine about to start and register it with this process's Prometheus registry.

    The path travels to the workers in the environment: vLLM's configuration is hashed for its compilation cache, which
    must not miss because of a file name.
    """
    handle, path = tempfile.mkstemp(prefix="vllm-ppd-", suffix=".counters")
    with os.fdopen(handle, "wb") as file:
        file.write(np.zeros((max(1, parallel_config.data_parallel_size), len(COUNTERS))).tobytes())
    if not _published:
        from prometheus_client import REGISTRY

        REGISTRY.register(_Collector())
    _published.append(path)
    os.environ[PATH_VARIABLE] = path
    atexit.register(_remove, path)
    return path


class Counters:
    """The worker's side; only the first tensor-parallel rank of an engine writes."""

    def __init__(self, parallel_config: Any) -> None:
        path = os.environ.get(PATH_VARIABLE)
        self._column = {name: column for column, name in enumerate(COUNTERS)}
        self.values = np.zeros(len(COUNTERS))
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
    """Reads the files when Prometheus scrapes."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        tables = [np.fromfile(path, dtype=np.float64).reshape(-1, len(COUNTERS)) for path in _published]
        for column, (name, text) in enumerate(COUNTERS.items()):
            family = CounterMetricFamily(f"ppd:{name}", text, labels=["engine"])
            for engine in range(max(map(len, tables), default=0)):
                total = sum(float(table[engine, column]) for table in tables if engine < len(table))
                family.add_metric([str(engine)], total)
            yield family


def _remove(path: str) -> None:
    if path in _published:
        _published.remove(path)
    if os.path.exists(path):
        os.remove(path)
