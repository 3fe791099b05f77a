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
    "deferred_steps": "Engine steps that ran the deep pass alone, or nothing, from saved states.",
    "fallback_steps": "Engine steps that ran the full forward.",
    "confidence_stops": "Times a request stopped drafting because its confidence was not over gamma.",
    "suppressed_drafts": "Drafts suppressed because they were not expected to pay (adaptive).",
    "exploration_steps": "Engine steps with more drafts than are expected to pay, to see their acceptance (adaptive).",
    "invalid_drafts": "Times a request's drafts were dropped: logits were not finite, or q(x) no distribution.",
    "lookup_steps": "Engine steps after which the requests' own text was drafted (prompt_lookup_min).",
    "skipped_draft_layer_steps": "Decode steps without the heads' layers, as no drafts follow (method dynamo).",
    "unverified_tokens": "Tokens emitted without verification (method dynamo with verify: false).",
    "early_predictions": "Tokens that schedule parallel started from an exit, before the final layer chose them.",
    "early_rejections": "Tokens of these that the final layer did not choose, or that followed such a one.",
    "drafting_seconds": "Seconds spent in drafting (shallow passes, early heads and their host work).",
    "group_micro_steps": "Micro-steps of a worker group: passes of the last stage within group steps.",
    "group_hits": "Tokens that a worker group had started before the target chose them.",
    "group_misses": "Tokens that no candidate of a worker group had started.",
    "group_candidates": "Candidates that a worker group ran through the first stage.",
    "group_candidates_discarded": "Candidates whose token the target did not choose.",
    "group_tokens": "Tokens that a worker group emitted in its steps.",
    "group_first_stage_layers": "Layers that the first stage computed for these, each over one token of one request.",
    "group_last_stage_layers": "Layers that the last stage computed for these, each over one token of one request.",
    "group_first_stage_seconds": "Seconds that the first stage spent in micro-steps, waiting included.",
    "group_first_stage_idle_seconds": "Seconds of these that it waited for the last stage's tokens.",
    "group_last_stage_seconds": "Seconds of the last stage in micro-steps but a step's first, waiting included.",
    "group_last_stage_idle_seconds": "Seconds of these that it waited for the first stage's states.",
}
_COLUMN = {name: column for column, name in enumerate(COUNTERS)}
PATH_VARIABLE = "PPD_COUNTERS_FILE"  # PATH#ROW:ROWS, the rows of the engine in the file
_ROWS = 4096  # of a table, whose unused rows take no memory
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
    if not _published:
        from prometheus_client import REGISTRY

        REGISTRY.register(_Collector())
    global _table
    if _table is None or not _table.has_room(engines):
        _table = _Table(max(_ROWS, engines))
    rows, place = _table.take(engines)
    _published.append(rows)
    os.environ[PATH_VARIABLE] = place


class _Table:
    """Rows of zeros in shared memory, taken by one engine after the other."""

    def __init__(self, rows: int) -> None:
        self.pid, self.used = os.getpid(), 0
        self.descriptor = os.memfd_create("vllm-ppd-counters")
        os.ftruncate(self.descriptor, 8 * rows * len(COUNTERS))
        memory = mmap.mmap(self.descriptor, 8 * rows * len(COUNTERS))
        self.rows = np.frombuffer(memory, dtype=np.float64).reshape(rows, len(COUNTERS))

    def has_room(self, engines: int) -> bool:
        """Not in a forked process, which would take the rows that its parent takes."""
        return self.pid == os.getpid() and self.used + engines <= len(self.rows)

    def take(self, engines: int) -> tuple[np.ndarray, str]:
        """Rows, and where other processes find them."""
        first, self.used = self.used, self.used + engines
        return self.rows[first : self.used], f"/proc/{self.pid}/fd/{self.descriptor}#{first}:{engines}"


_table: _Table | None = None


class Counters:
    """The worker's side; only the first rank of an engine (of a pipeline stage, in a worker group) writes."""

    def __init__(self, parallel_config: Any) -> None:
        self.values = np.zeros(len(COUNTERS))
        place = os.environ.get(PATH_VARIABLE)
        # Ranks of a stage come one after the other.
        ranks_of_a_stage = parallel_config.world_size // parallel_config.pipeline_parallel_size
        if place is None or parallel_config.rank % ranks_of_a_stage != 0:
            return
        try:
            path, _, rows_of_engine = place.partition("#")
            first, count = map(int, rows_of_engine.split(":"))
            rows = np.memmap(path, dtype=np.float64, mode="r+").reshape(-1, len(COUNTERS))[first : first + count]
            # As an array: an entry of a memmap takes twice as long.
            self.values = np.asarray(rows[parallel_config.data_parallel_index])
        except (OSError, ValueError, IndexError) as error:
            # A worker on another machine: drafting works, its counters are not seen.
            logger.warning("vllm-ppd: counters are not published (%s)", error)

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self.values[_COLUMN[name]] += amount


def totals() -> dict[str, float]:
    """Each counter, over all engines of this process."""
    return {name: sum(float(table[:, column].sum()) for table in _published) for name, column in _COLUMN.items()}


class _Collector:
    """Reads the counters when Prometheus scrapes; engines of one process are added up by rank."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, text in COUNTERS.items():
            family = CounterMetricFamily(f"ppd:{name}", text, labels=["engine"])
            for engine in range(max(map(len, _published), default=0)):
                total = sum(float(table[engine, _COLUMN[name]]) for table in _published if engine < len(table))
                family.add_metric([str(engine)], total)
            yield family
