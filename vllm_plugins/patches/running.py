# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of a running engine: requests, whose bad options are the client's errors,
the choice of the scheduler, the engine's core, and the loggers, which publish our counters
(engine/metrics.py).
"""

import functools
import inspect
from pkgutil import resolve_name
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.config.request_options import check
from vllm_ppd.vllm_plugins.draft_length.costs import STEP_COSTS
from vllm_ppd.vllm_plugins.engine.metrics import STATISTICS, Published
from vllm_ppd.vllm_plugins.patches.start import Original
from vllm_ppd.vllm_plugins.registry import OURS

_signature = functools.cache(inspect.signature)
# Attribute that we add to a StatLoggerManager
PUBLISHED = "vllm_ppd_published"


def validate_params(
    original: Original, self: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """InputProcessor._validate_params: check the request's options as well."""
    config = active_config(self.vllm_config)
    if config is not None:
        check(params, config)
    return original(self, params, *args, **kwargs)


def validate_spec_decode(
    original: Original, self: Any, speculative_config: Any
) -> None:
    """SamplingParams._validate_spec_decode: allow min_p and logit_bias.

    vLLM's sampler applies them to each row of logits, and our verification accepts only
    the tokens that this sampler draws.
    """
    model = getattr(speculative_config, "model", None)
    if not str(model).startswith(OURS):
        original(self, speculative_config)


def checked_before_streaming(
    original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """An asynchronous generator of vLLM: check sampling_params when it is made, not
    when it first runs.

    At that time a streamed response has not begun, so its status can be 400.
    """
    config = active_config(
        getattr(self, "vllm_config", None) or self.engine_client.vllm_config
    )
    if config is not None:
        check(
            _signature(original)
            .bind(self, *args, **kwargs)
            .arguments["sampling_params"],
            config,
        )
    return original(self, *args, **kwargs)


def get_scheduler_cls(original: Original, self: Any) -> type:
    """SchedulerConfig.get_scheduler_cls: ours without vLLM's warning of custom ones."""
    if str(self.scheduler_cls).startswith(OURS):
        return resolve_name(self.scheduler_cls)
    return original(self)


def initialize_kv_caches(original: Original, self: Any, vllm_config: Any) -> Any:
    """EngineCore._initialize_kv_caches: measure step costs as soon as steps can run.
    They travel to the scheduler with the configuration of the KV cache.

    A wrapped EngineCore.__init__ would never run in an engine process that is spawned,
    as that process loads plugins within it.
    """
    kv_cache_config = original(self, vllm_config)
    config = active_config(vllm_config)
    if config is not None and config.adaptive:
        costs = self.model_executor.collective_rpc("step_costs")[0]
        setattr(kv_cache_config, STEP_COSTS, costs)
    return kv_cache_config


def post_step(original: Original, self: Any, model_executed: bool) -> None:
    """EngineCore.post_step: do not ask a worker group for drafts, which would wait for
    the step in flight.
    """
    config = active_config(self.vllm_config)
    if config is None or config.stages == 1:
        original(self, model_executed)


def sleep(
    original: Original, self: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """EngineCore.sleep: refuse a level that discards the heads, before anything is
    paused.

    Level 1 restores heads and saved states with the weights, since all are allocated
    together.

    Raises:
        OptionError: on any other level.
    """
    if level > 1 and active_config(self.vllm_config) is not None:
        raise OptionError(
            f"sleep level {level} is not supported with vllm-ppd: it discards the "
            "heads, which vLLM would not load again; use level 1"
        )
    return original(self, level, *args, **kwargs)


def make_loggers(
    original: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """StatLoggerManager.__init__: register the counters of engines that draft."""
    original(self, vllm_config, *args, **kwargs)
    config = active_config(vllm_config)
    if config is not None:
        name = str(vllm_config.model_config.served_model_name)
        setattr(self, PUBLISHED, Published(name, self.engine_indexes, config))


def record(
    original: Original,
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
