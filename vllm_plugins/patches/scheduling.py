# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of the choice of vLLM's scheduler, and of the engine's core."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.registry import OURS


def get_scheduler_cls(original: Callable[..., type], self: Any) -> type:
    """SchedulerConfig.get_scheduler_cls: ours without vLLM's warning of custom ones."""
    if str(self.scheduler_cls).startswith(OURS):
        scheduler: type = resolve_name(self.scheduler_cls)
        return scheduler
    return original(self)


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
    config = active_config(core.vllm_config)
    if config is not None and config.adaptive:
        costs = core.model_executor.collective_rpc(
            "step_costs", kwargs={"again": again}
        )[0]
        core.scheduler.follow(costs)


def post_step(
    original: Callable[..., None], self: Any, model_executed: bool
) -> None:
    """EngineCore.post_step: do not ask a worker group for drafts, which would wait for
    the step in flight.
    """
    config = active_config(self.vllm_config)
    if config is None or config.stages == 1:
        original(self, model_executed)


def sleep(
    original: Callable[..., Any],
    self: Any,
    level: int = 1,
    *args: Any,
    **kwargs: Any,
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
