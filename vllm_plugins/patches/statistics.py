# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of vLLM's statistics, which carry our counters (engine/metrics.py) and
watch acceptance.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.request_options import request_options
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts
from vllm_ppd.vllm_plugins.engine.metrics import (
    ATTRIBUTE,
    Counts,
    Published,
    count_in_process,
)

logger = logging.getLogger("vllm.vllm_ppd")

WINDOW = 1000  # drafts as counted by vLLM: one per request and step
NEAR_ZERO = 0.01  # accepted / drafted tokens


class AcceptanceWatch:
    """Counts in windows of a thousand drafts; warns on the first window near zero, and
    again after a recovery.
    """

    def __init__(self) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.warned = False

    def observe(self, drafted: int, accepted: int) -> None:
        """Count a request's verified drafts in a step, and how many of them were accepted."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        if self.drafts < WINDOW:
            return
        rate = self.accepted / self.drafted
        if rate >= NEAR_ZERO:
            self.warned = False
        elif not self.warned:
            self.warned = True
            logger.warning(
                "vllm-ppd: %d of %d drafted tokens were accepted over the last %d "
                "drafts (%.2f %%): drafting costs more time than it gains; use heads "
                "trained for this model, a deeper exit_layer, or no drafting",
                self.accepted,
                self.drafted,
                self.drafts,
                100 * rate,
            )
        self.drafts = self.drafted = self.accepted = 0


KEY = "vllm_ppd"  # in the statistics of KV connectors
# Attributes that we add to vLLM's objects.
PENDING = "vllm_ppd_pending"  # of a Scheduler: counts that wait for the next statistics
WATCH = "vllm_ppd_acceptance_watch"  # of a Scheduler
PUBLISHED = "vllm_ppd_published"  # of a StatLoggerManager


def watch_acceptance(scheduler: Any) -> None:
    """Let a scheduler warn if hardly any draft is accepted."""
    setattr(scheduler, WATCH, AcceptanceWatch())


def update_from_output(
    original: Callable[..., Any],
    self: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Scheduler: keep the counts of a step's output until the statistics are made."""
    output = model_runner_output
    counts: Counts = dict(getattr(output, ATTRIBUTE, {}))
    lookup = getattr(self, "dynamic_sd_lookup", None)
    watch: AcceptanceWatch | None = getattr(self, WATCH, None)
    scheduled = isinstance(lookup, ScheduledDrafts)
    seen = []
    if scheduled or watch is not None:
        seen = verified(self.requests, scheduler_output, output, scheduled)
    for _, drafts, emitted, *_ in seen:
        if drafts and watch is not None:
            watch.observe(drafts, emitted - 1)
    if isinstance(lookup, ScheduledDrafts):
        if seen:
            lookup.observe(*map(list, zip(*seen, strict=True)))
        counts.update(lookup.take_counts())
    if counts:
        count_in_process(counts)
        if self.log_stats:
            pending = getattr(self, PENDING, Counter())
            pending.update(counts)
            setattr(self, PENDING, pending)
    result = original(self, scheduler_output, output, *args, **kwargs)
    if isinstance(lookup, ScheduledDrafts) and lookup.texts is not None:
        for req_id, *_, may_draft in seen:
            if may_draft and req_id in self.requests:
                lookup.texts.extend(req_id, self.requests[req_id].all_token_ids)
        lookup.texts.forget_others(self.requests)
    return result


def verified(
    requests: dict[str, Any], scheduler_output: Any, output: Any, with_others: bool
) -> list[tuple[str, int, int, bool, bool]]:
    """(Request, verified drafts, emitted tokens, whether it decodes greedily, whether
    it may draft) for each in a step.

    Requests that emitted nothing are left out, and so are those without drafts, unless
    requested. The drafts of a request that opted out do not count, as the runner
    rejects them.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    seen = []
    for req_id in output.req_ids if with_others else drafts:
        emitted = len(output.sampled_token_ids[output.req_id_to_index[req_id]])
        request = requests.get(req_id)
        if emitted and request is not None:
            params = request.sampling_params
            may_draft = request_options(params.extra_args).ppd_draft
            number = len(drafts.get(req_id, ())) if may_draft else 0
            seen.append((req_id, number, emitted, not params.temperature, may_draft))
    return seen


def make_stats(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Scheduler: put the counts into the step's statistics, in the open dictionary of
    KV connectors' statistics.
    """
    stats = original(self, *args, **kwargs)
    counts = getattr(self, PENDING, None)
    if stats is not None and counts:
        stats.kv_connector_stats = {
            **(stats.kv_connector_stats or {}),
            KEY: dict(counts),
        }
        counts.clear()
    return stats


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
            self, PUBLISHED, Published(name, self.engine_indexes, config.stages > 1)
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
    if carried and KEY in carried:
        counts = carried.pop(KEY)
        scheduler_stats.kv_connector_stats = carried or None
        published: Published | None = getattr(self, PUBLISHED, None)
        if published is not None:
            published.observe(counts, engine_idx or 0)
    return original(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)
