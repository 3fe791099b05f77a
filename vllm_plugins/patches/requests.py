# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls that take a request: a bad value of one of our options is the client's error."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.request_options import check
from vllm_ppd.vllm_plugins.registry import OURS

_signature = functools.cache(inspect.signature)


def validate_params(
    original: Callable[..., Any],
    self: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """InputProcessor._validate_params: check the request's options as well."""
    config = active_config(self.vllm_config)
    if config is not None:
        check(params, config)
    return original(self, params, *args, **kwargs)


def validate_spec_decode(
    original: Callable[..., None], self: Any, speculative_config: Any
) -> None:
    """SamplingParams._validate_spec_decode: allow min_p and logit_bias.

    vLLM's sampler applies them to each row of logits, and our verification accepts only
    the tokens that this sampler draws.
    """
    if speculative_config is None:
        return
    if not str(speculative_config.model).startswith(OURS):
        original(self, speculative_config)


def checked_before_streaming(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
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
