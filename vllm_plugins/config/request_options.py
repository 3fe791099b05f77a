# SPDX-License-Identifier: Apache-2.0
"""Options of a single request, in vLLM's `vllm_xargs` (offline:
SamplingParams(extra_args={...})).

ppd_draft   false: do not draft for this request
ppd_eps_b   0..1: back-off threshold of this request (method dynamo)

JSON's true and false arrive as 1 and 0, since vLLM's request model has only strings,
numbers and lists.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.text import quoted, shortened
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.registry import METHODS

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig

DRAFT = "ppd_draft"
EPS_B = "ppd_eps_b"
OPTIONS = (DRAFT, EPS_B)
PREFIX = "ppd"
# Difflib ratio above which a key without our prefix counts as a misspelt key of ours
NEAR = 0.85
LONGEST_NAME = 32  # characters compared
_TEXTS = {"true": True, "false": False}


def drafting_allowed(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request wants drafts.

    Raises:
        ValueError: if the value is not a truth value: a bool, 0, 1, "true" or "false".
    """
    value = (extra_args or {}).get(DRAFT, True)
    truth = _TEXTS.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(truth, int) and truth in (0, 1):
        return bool(truth)
    raise ValueError(
        f"vllm_xargs[{DRAFT!r}]={quoted(value)} is not a boolean; use true or false"
    )


def back_off_threshold(extra_args: Mapping[str, Any] | None) -> float | None:
    """The eps_b that a request sets, or None.

    Raises:
        ValueError: if the value is not a number in 0..1.
    """
    if not extra_args or EPS_B not in extra_args:
        return None
    value = extra_args[EPS_B]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= 1
    ):
        raise ValueError(
            f"vllm_xargs[{EPS_B!r}]={quoted(value)} is not a number from 0 to 1"
        )
    return float(value)


def check_names(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a misspelt key of ours, since a misspelt opt-out would not stop drafting.

    Raises:
        ValueError: naming the nearest key.
    """
    for key in (
        key for key in extra_args or () if isinstance(key, str) and key not in OPTIONS
    ):
        name = key.strip()[:LONGEST_NAME].lower()
        if near := difflib.get_close_matches(
            name, OPTIONS, n=1, cutoff=0 if name.startswith(PREFIX) else NEAR
        ):
            raise ValueError(
                f"vllm_xargs has no key {quoted(key)}; did you mean {near[0]!r}?"
            )


def sees_each_token(params: Any) -> bool:
    """Whether the next token of a request depends on state that the engine updates
    after each token.
    """
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.min_tokens
        or params.bad_words
        or params.structured_outputs
        or params.thinking_token_budget is not None
    )


def needs_single_tokens(params: Any) -> bool:
    """Whether a request needs one token at a time: its own random draws, or state after
    each token.
    """
    return params is None or bool(
        params.seed is not None
        or params.num_logprobs is not None
        or params.min_p
        or params.logit_bias
        or params.allowed_token_ids
        or sees_each_token(params)
    )


def check(params: Any, config: DraftingConfig) -> None:
    """Refuse a request that the server's method cannot serve; vLLM's front end answers
    HTTP 400.

    Raises:
        VLLMValidationError: naming the key and the value.
    """
    extra_args = getattr(params, "extra_args", None)
    try:
        check_names(extra_args)
        drafting_allowed(extra_args)
        if (
            back_off_threshold(extra_args) is not None
            and "eps_b" not in config.spec.request_options
        ):
            methods = " and ".join(
                repr(name)
                for name, spec in METHODS.items()
                if "eps_b" in spec.request_options
            )
            raise ValueError(
                f"vllm_xargs[{EPS_B!r}] is an option of method {methods}, not of this "
                "server's; omit it"
            )
    except ValueError as error:
        raise platform.invalid_request(
            shortened(str(error)), parameter="vllm_xargs"
        ) from None
    if not config.verify and getattr(params, "structured_outputs", None) is not None:
        raise platform.invalid_request(
            "structured outputs need verified tokens, but this server emits "
            "unverified ones (verify: false)",
            parameter="structured_outputs",
        )
