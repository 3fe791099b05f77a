# SPDX-License-Identifier: Apache-2.0
"""The wrapped calls by which `vllm serve HEADS` serves the target that heads name, with these heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def maybe_override_with_speculators(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_override_with_speculators(
        model: Any, tokenizer: Any, *args: Any, vllm_speculative_config: Any = None, **kwargs: Any
    ) -> Any:
        from vllm_ppd.heads.hub import token
        from vllm_ppd.vllm_plugins.config.activation import refusals_in_one_line
        from vllm_ppd.vllm_plugins.config.naming import served_heads

        with refusals_in_one_line(), token(kwargs.get("hf_token")):
            served = served_heads(model, vllm_speculative_config, kwargs.get("revision"))
        if served is None:
            return original(model, tokenizer, *args, vllm_speculative_config=vllm_speculative_config, **kwargs)
        target, speculative_config = served
        return target, tokenizer or target, speculative_config

    return maybe_override_with_speculators


def get_model_path(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_model_path(model: Any, *args: Any, **kwargs: Any) -> Any:
        # ORGANISATION/NAME@REVISION names heads, which are found later; vLLM would refuse it here, offline.
        if "@" in str(model):
            from vllm_ppd.heads.hub import hub_name

            if hub_name(str(model)) is not None:
                return model
        return original(model, *args, **kwargs)

    return get_model_path
