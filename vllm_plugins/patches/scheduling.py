# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of vLLM's scheduler and of the engine's core."""

import logging
from collections.abc import Callable
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.repeated_text import RepeatedText
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.patches.statistics import watch_acceptance

logger = logging.getLogger("vllm.vllm_ppd")

# Attribute that we add to a Scheduler: its ScheduledDrafts in a step that pads
PADDING = "vllm_ppd_padding"


def make_scheduler(
    original: Callable[..., None],
    self: Any,
    vllm_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Scheduler.__init__: watch acceptance, and choose the number of drafts."""
    original(self, vllm_config, *args, **kwargs)
    config = active_config(vllm_config)
    if config is None:
        return
    ahead = (
        "asynchronous"
        if vllm_config.scheduler_config.async_scheduling
        else "synchronous"
    )
    logger.info("vllm-ppd: %s scheduling", ahead)
    # Tokens that a worker group emits in a step are scheduled as drafts, but never
    # verified.
    if config.stages == 1 and not config.spec.looks_up_alone:
        watch_acceptance(self)
    if vllm_config.parallel_config.data_parallel_size > 1:
        # Ranks that step together must draft as many tokens; those of vLLM's own
        # processes see a size of 1.
        self.dynamic_sd_lookup = None
        if config.adaptive:
            logger.warning(
                "vllm-ppd: every step drafts, as with adaptive: false, since "
                "data-parallel ranks that step together cannot choose for "
                "themselves; let vLLM start the ranks to have the choice"
            )
    elif config.adaptive:
        self.dynamic_sd_lookup = ScheduledDrafts(
            config.num_speculative_tokens,
            config.disable_by_batch_size,
            self.max_num_running_reqs,
            None
            if config.prompt_lookup_min is None
            else RepeatedText(config.prompt_lookup_min),
            config.spec.looks_up_alone,
        )


def schedule(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Scheduler.schedule: keep steps uniform where a request is admitted with one token
    to compute.

    vLLM pads such a request with placeholder drafts, unless it finds a lookup of the
    number of drafts. A decode instance of disaggregated serving admits every request
    so. A step that is not uniform takes no whole-model graph.
    """
    drafts = getattr(self, "dynamic_sd_lookup", None)
    if not isinstance(drafts, ScheduledDrafts) or drafts.latest != self.num_spec_tokens:
        return original(self, *args, **kwargs)
    with temporarily(self, **{"dynamic_sd_lookup": None, PADDING: drafts}):
        return original(self, *args, **kwargs)


def update_after_schedule(
    original: Callable[..., Any], self: Any, scheduler_output: Any
) -> Any:
    """Scheduler._update_after_schedule: choose the number of drafts of a step that pads."""
    drafts: ScheduledDrafts | None = getattr(self, PADDING, None)
    if drafts is not None and scheduler_output.num_scheduled_tokens:
        scheduler_output.num_spec_tokens_to_schedule = drafts[
            len(scheduler_output.num_scheduled_tokens)
        ]
    return original(self, scheduler_output)


def make_core(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    """EngineCore.__init__: let the scheduler choose the number of drafts by the
    workers' step costs.
    """
    original(self, *args, **kwargs)
    follow_step_costs(self)


def follow_step_costs(core: Any, again: bool = False) -> None:
    """Let an EngineCore's scheduler choose by step costs, which are measured again if `again`."""
    lookup = getattr(core.scheduler, "dynamic_sd_lookup", None)
    if isinstance(lookup, ScheduledDrafts):
        costs = core.model_executor.collective_rpc(
            "step_costs", kwargs={"again": again}
        )[0]
        if costs is not None:
            lookup.follow(StepCosts(costs.method))


def post_step(original: Callable[..., None], self: Any, model_executed: bool) -> None:
    """EngineCore.post_step: do not ask a worker group for drafts, which would wait for
    the step in flight.
    """
    config = active_config(self.vllm_config)
    if config is None or config.stages == 1:
        original(self, model_executed)


def sleep(
    original: Callable[..., Any], self: Any, level: int = 1, *args: Any, **kwargs: Any
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
