# SPDX-License-Identifier: Apache-2.0
"""Patches that carry our choice of model runner (config/runner.py) to the places where vLLM asks for its own, and
what vLLM 0.32 grants its own methods on runner V2 alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args


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


def post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config_of(self)
        if config is None or config.runner != "v2":
            return original(self, *args, **kwargs)
        with _asynchronous_methods():
            return original(self, *args, **kwargs)

    return __post_init__


@contextmanager
def _asynchronous_methods() -> Iterator[None]:
    """While vLLM decides whether to schedule asynchronously: 0.32 does so with a closed list of methods."""
    from vllm.config import vllm as module

    stock = module.NgramGPUTypes
    module.NgramGPUTypes = Literal[(*get_args(stock), "custom_class")]
    try:
        yield
    finally:
        module.NgramGPUTypes = stock
