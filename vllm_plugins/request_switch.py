# SPDX-License-Identifier: Apache-2.0
"""The per-request switch: `vllm_xargs={"ppd_draft": false}` (offline: SamplingParams(extra_args={...}))."""

from __future__ import annotations

from typing import Any

KEY = "ppd_draft"
# JSON booleans reach us as 0 and 1: vLLM's request model knows strings and numbers only.
_VALUES = {"true": True, "false": False, "1": True, "0": False}


def drafting_allowed(extra_args: dict[str, Any] | None) -> bool:
    """Whether a request wants drafts.

    Raises:
        ValueError: if the value is not a truth value.
    """
    if not extra_args or KEY not in extra_args:
        return True
    value = extra_args[KEY]
    try:
        return _VALUES[str(value).lower()]
    except KeyError:
        raise ValueError(f"vllm_xargs[{KEY!r}]={value!r} is not a truth value; use true or false") from None


def check(params: Any) -> None:
    """Refuse a request with a bad value; vLLM's front end answers HTTP 400.

    Raises:
        VLLMValidationError: naming the key and the value.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        drafting_allowed(getattr(params, "extra_args", None))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
