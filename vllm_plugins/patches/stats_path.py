# SPDX-License-Identifier: Apache-2.0
"""The wrapped calls of vLLM's statistics, on whose way our counters travel (metrics.py) and acceptance is watched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ppd.vllm_plugins.config.request_options import drafting_allowed
from vllm_ppd.vllm_plugins.drafting.acceptance_watch import AcceptanceWatch
from vllm_ppd.vllm_plugins.engine.metrics import ATTRIBUTE, Counts, Published, count_in_process

KEY = "vllm_ppd"  # among the statistics of KV connectors
_PENDING, _PUBLISHED, _WATCH = "_vllm_ppd_pending", "_vllm_ppd_published", "_vllm_ppd_watch"


def watch_acceptance(scheduler: Any) -> None:
    """Have a scheduler warn where hardly any draft is accepted, on either runner."""
    setattr(scheduler, _WATCH, AcceptanceWatch())


def update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scheduler: keep what a step's output carries until the statistics are made."""

    @functools.wraps(original)
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        counts: Counts | None = getattr(model_runner_output, ATTRIBUTE, None)
        if counts:
            count_in_process(counts)
            pending: Counts = getattr(self, _PENDING, {}) if self.log_stats else {}
            for name, amount in counts.items() if self.log_stats else ():
                pending[name] = pending.get(name, 0.0) + amount
            setattr(self, _PENDING, pending)
        watch: AcceptanceWatch | None = getattr(self, _WATCH, None)
        if watch is not None and scheduler_output.scheduled_spec_decode_tokens:
            _observe(watch, self.requests, scheduler_output, model_runner_output)
        return original(self, scheduler_output, model_runner_output, *args, **kwargs)

    return update_from_output


def _observe(watch: AcceptanceWatch, requests: Any, scheduler_output: Any, output: Any) -> None:
    for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        emitted, request = len(output.sampled_token_ids[output.req_id_to_index[req_id]]), requests.get(req_id)
        # On runner V2 a request that opted out is given drafts, too, which are rejected.
        if drafts and emitted and request is not None and drafting_allowed(request.sampling_params.extra_args):
            watch.observe(len(drafts), emitted - 1)


def make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scheduler: put it into the statistics of the step."""

    @functools.wraps(original)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = original(self, *args, **kwargs)
        counts = getattr(self, _PENDING, None)
        if stats is not None and counts:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: counts}
            setattr(self, _PENDING, {})
        return stats

    return make_stats


def stat_loggers(original: Callable[..., Any]) -> Callable[..., Any]:
    """StatLoggerManager: register the counters where an engine drafts."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_ppd.vllm_plugins.config.activation import active_config

        original(self, vllm_config, *args, **kwargs)
        config = active_config(vllm_config)
        if config is not None:
            name = str(vllm_config.model_config.served_model_name)
            setattr(self, _PUBLISHED, Published(name, self.engine_indexes, config.stages > 1))

    return __init__


def record(original: Callable[..., Any]) -> Callable[..., Any]:
    """StatLoggerManager: take them out before vLLM's own loggers read the statistics."""

    @functools.wraps(original)
    def record(self: Any, scheduler_stats: Any, *args: Any, engine_idx: int | None = None, **kwargs: Any) -> Any:
        carried = getattr(scheduler_stats, "kv_connector_stats", None)
        if carried and KEY in carried:
            counts = carried.pop(KEY)
            scheduler_stats.kv_connector_stats = carried or None
            published: Published | None = getattr(self, _PUBLISHED, None)
            if published is not None:
                published.observe(counts, engine_idx or 0)
        return original(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    return record


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.metrics.loggers:StatLoggerManager"
PATCHES: list[tuple[str, str, Callable[[Any], Any]]] = [
    (_SCHEDULER, "update_from_output", update_from_output),
    (_SCHEDULER, "make_stats", make_stats),
    (_MANAGER, "__init__", stat_loggers),
    (_MANAGER, "record", record),
]
