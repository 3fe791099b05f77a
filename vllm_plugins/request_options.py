# SPDX-License-Identifier: Apache-2.0
"""Options of a single request, in vLLM's `vllm_xargs` (offline: SamplingParams(extra_args={...})).

ppd_draft   false: do not draft for this request
ppd_eps_b   0..1: back-off threshold of this request (method dynamo)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config import DraftingConfig

DRAFT, EPS_B = "ppd_draft", "ppd_eps_b"
# JSON booleans reach us as 0 and 1: vLLM's request model knows strings and numbers only.
_VALUES = {"true": True, "false": False, "1": True, "0": False}


def drafting_allowed(extra_args: dict[str, Any] | None) -> bool:
    """Whether a request wants drafts.

    Raises:
        ValueError: if the value is not a truth value.
    """
    if not extra_args or DRAFT not in extra_args:
        return True
    value = extra_args[DRAFT]
    try:
        return _VALUES[str(value).lower()]
    except KeyError:
        raise ValueError(f"vllm_xargs[{DRAFT!r}]={value!r} is not a truth value; use true or false") from None


def back_off_threshold(extra_args: dict[str, Any] | None) -> float | None:
    """A request's own eps_b, or None.

    Raises:
        ValueError: if the value is not a number in 0..1.
    """
    if not extra_args or EPS_B not in extra_args:
        return None
    value = extra_args[EPS_B]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"vllm_xargs[{EPS_B!r}]={value!r} is not a number from 0 to 1")
    return number


def sees_each_token(params: Any) -> bool:
    """Whether what a request may say next depends on each token said before, as the engine keeps it."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.min_tokens
        or params.bad_words
        or params.structured_outputs
        or params.thinking_token_budget is not None
    )


def one_token_at_a_time(params: Any) -> bool:
    """Whether a request asks for what n-grams emitted at once cannot give: its own draws, or a say in each token."""
    return params is None or bool(
        params.seed is not None
        or params.num_logprobs is not None
        or params.min_p
        or params.logit_bias
        or params.allowed_token_ids
        or sees_each_token(params)
    )


def check(params: Any, config: DraftingConfig) -> None:
    """Refuse a request that the server's method cannot serve as asked; vLLM's front end answers HTTP 400.

    Raises:
        VLLMValidationError: naming the key and the value.
    """
    from vllm.exceptions import VLLMValidationError

    extra_args = getattr(params, "extra_args", None)
    try:
        drafting_allowed(extra_args)
        if back_off_threshold(extra_args) is not None and config.method != "dynamo":
            raise ValueError(f"vllm_xargs[{EPS_B!r}] belongs to method 'dynamo'; this server drafts with another")
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
    if not config.verify and getattr(params, "structured_outputs", None) is not None:
        raise VLLMValidationError(
            "structured outputs need verified tokens, and this server emits unverified ones (verify: false)",
            parameter="structured_outputs",
        )
