# SPDX-License-Identifier: Apache-2.0
"""On a CPU: vLLM alone on its model runner V2, with our kernels, as
VLLM_USE_V2_MODEL_RUNNER would start it.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig

from vllm_ppd.vllm_plugins.engine.cpu import native

# additional_config of such an engine; the variable would be that of all engines
MARK = {"plain_v2": True}


@functools.cache
def allow() -> None:
    """Let MARK decide on the runner."""
    stock: Any = vars(VllmConfig)["use_v2_model_runner"].fget

    @functools.wraps(stock)
    def use_v2_model_runner(self: Any) -> bool:
        settings = self.additional_config
        marked = isinstance(settings, dict) and settings.items() >= MARK.items()
        return marked or stock(self)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)


@contextmanager
def starting() -> Iterator[None]:
    """Start engines within: vLLM would refuse runner V2 on a CPU without Triton."""
    allow()
    native.register()
    with native.accepted():
        yield
