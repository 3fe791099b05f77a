# SPDX-License-Identifier: Apache-2.0
"""Patches that carry our choice of model runner (config/runner.py) to the places where vLLM asks for its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def _config_of(vllm_config: Any) -> Any:
    from vllm_ppd.vllm_plugins.config.activation import active_config

    return active_config(vllm_config)


def use_v2_model_runner(original: property) -> property:
    assert original.fget is not None
    stock = original.fget

    @functools.wraps(stock)
    def use_v2_model_runner(self: Any) -> bool:
        config = _config_of(self)
        return bool(stock(self)) if config is None else config.runner == "v2"

    return property(use_v2_model_runner)


def unsupported_features(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        found = original(self)
        # vLLM's V2 starts no proposer class of others; our runner brings the speculator itself.
        return found if _config_of(self) is None else [feature for feature in found if "'custom_class'" not in feature]

    return _get_v2_model_runner_unsupported_features
