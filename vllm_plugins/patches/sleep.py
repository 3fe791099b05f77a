# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: level 1 brings heads and saved states back with the weights, as all are allocated where these are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def level_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """EngineCore.sleep: refuse a level that discards the heads, before anything is paused."""

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.activation import is_active
        from vllm_ppd.vllm_plugins.config.options import OptionError

        if level > 1 and is_active(self.vllm_config):
            raise OptionError(
                f"sleep level {level} is not supported with vllm-ppd: it discards the heads, which vLLM would not load "
                "again; use level 1"
            )
        return original(self, level, *args, **kwargs)

    return sleep
