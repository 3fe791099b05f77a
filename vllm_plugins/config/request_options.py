# SPDX-License-Identifier: Apache-2.0
"""Options of a single request, in vLLM's `vllm_xargs` (offline:
SamplingParams(extra_args={...})).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from vllm_ppd.heads.text import first_problem, quoted, shortened
from vllm_ppd.vllm_plugins import platform

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig

LONGEST_NAME = 32  # characters of a key that are compared
# Difflib ratio above which a key without our prefix counts as a misspelt key of ours
NEAR = 0.85


class RequestOptions(BaseModel):
    """Options that a request may set; others in the same dictionary are not ours.

    JSON's true and false arrive as 1 and 0, since vLLM's request model has only
    strings, numbers and lists.
    """

    ppd_draft: bool = Field(
        True, description="false: do not draft for this request"
    )
    ppd_learn: bool = Field(
        True, description="false: do not learn from the answer to this request"
    )
    ppd_num_drafts: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None,
        description="maximum number of drafts of this request that a step verifies",
    )
    ppd_eps_b: Annotated[float, Field(strict=True, ge=0, le=1)] | None = Field(
        None, description="back-off threshold of this request (method dynamo)"
    )

    def most_drafts(self, configured: int) -> int:
        """The most drafts of a step, of as many as are configured."""
        if not self.ppd_draft:
            return 0
        if self.ppd_num_drafts is None:
            return configured
        return min(self.ppd_num_drafts, configured)


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options of a request.

    Raises:
        ValueError: if a value is of another type, or out of range.
    """
    try:
        return RequestOptions.model_validate(extra_args or {})
    except ValidationError as error:
        problem = first_problem(error, lambda name: f"vllm_xargs[{name!r}]")
        raise ValueError(problem) from None


def check_names(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a misspelt key of ours, since a misspelt opt-out would not stop drafting.

    Raises:
        ValueError: naming the nearest key.
    """
    known = list(RequestOptions.model_fields)
    for key in extra_args or ():
        if key in known:
            continue
        name = str(key).strip()[:LONGEST_NAME].lower()
        cutoff = 0 if name.startswith("ppd") else NEAR
        near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
        if near:
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
    return bool(
        params.seed is not None
        or params.num_logprobs is not None
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
        options = request_options(extra_args)
        most = config.num_speculative_tokens
        if (options.ppd_num_drafts or 0) > most:
            raise ValueError(
                f"vllm_xargs['ppd_num_drafts']={options.ppd_num_drafts} is more than "
                f"the {most} drafts of this server; set 0 to {most}, or omit it"
            )
        if options.ppd_eps_b is not None and "eps_b" not in config.spec.options:
            raise ValueError(
                "vllm_xargs['ppd_eps_b'] is not an option of this server's method "
                f"{config.method!r}; omit it"
            )
    except ValueError as error:
        raise platform.invalid_request(
            shortened(str(error)), parameter="vllm_xargs"
        ) from None
    if config.verify:
        return
    for name in ("structured_outputs", "min_p", "logit_bias"):
        if getattr(params, name, None):
            raise platform.invalid_request(
                f"{name} needs verified tokens, but this server emits unverified ones "
                "(verify: false)",
                parameter=name,
            )
