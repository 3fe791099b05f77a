# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of vLLM's loggers, which publish our counters (engine/metrics.py)."""

from collections.abc import Callable
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.engine.metrics import STATISTICS, Published

# Attribute that we add to a StatLoggerManager
PUBLISHED = "vllm_ppd_published"


def make_loggers(
    original: Callable[..., None],
    self: Any,
    vllm_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """StatLoggerManager.__init__: register the counters of engines that draft."""
    original(self, vllm_config, *args, **kwargs)
    config = active_config(vllm_config)
    if config is not None:
        name = str(vllm_config.model_config.served_model_name)
        setattr(
            self,
            PUBLISHED,
            Published(name, self.engine_indexes, config.stages > 1),
        )


def record(
    original: Callable[..., Any],
    self: Any,
    scheduler_stats: Any,
    *args: Any,
    engine_idx: int | None = None,
    **kwargs: Any,
) -> Any:
    """StatLoggerManager: take the counts out before vLLM's own loggers read the statistics."""
    carried = getattr(scheduler_stats, "kv_connector_stats", None)
    if carried and STATISTICS in carried:
        counts = carried.pop(STATISTICS)
        scheduler_stats.kv_connector_stats = carried or None
        published: Published | None = getattr(self, PUBLISHED, None)
        if published is not None:
            published.observe(counts, engine_idx or 0)
    return original(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)
