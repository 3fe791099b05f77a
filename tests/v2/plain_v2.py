# SPDX-License-Identifier: Apache-2.0
"""On a CPU: vLLM alone on its runner V2, with our kernels; and asynchronous scheduling."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.engine.cpu import native

MARK = {"plain_v2": True}  # additional_config of such an engine

asynchronous = False  # whether engines that start now schedule asynchronously


def allow() -> None:
    """Let MARK decide on the runner, and `asynchronous` on the scheduling."""
    stock_runner: Any = vars(VllmConfig)["use_v2_model_runner"].fget
    platform = type(current_platform)
    stock_check = platform.check_and_update_config.__func__

    @functools.wraps(stock_runner)
    def use_v2_model_runner(self: Any) -> bool:
        settings = self.additional_config
        marked = isinstance(settings, dict) and settings.items() >= MARK.items()
        return marked or stock_runner(self)

    @functools.wraps(stock_check)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock_check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)
    platform.check_and_update_config = classmethod(check_and_update_config)


@contextmanager
def starting(asynchronously: bool = False) -> Iterator[None]:
    """Start engines within: vLLM would refuse runner V2 on a CPU without Triton."""
    global asynchronous
    asynchronous = asynchronously
    native.register()
    try:
        with native.accepted():
            yield
    finally:
        asynchronous = False
