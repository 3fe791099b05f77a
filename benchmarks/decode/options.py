# SPDX-License-Identifier: Apache-2.0
"""Options of the benchmarks that decode batches, declared once."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from vllm_ppd.benchmarks.harness.options import BenchOptions, LoopOptions
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.vllm_plugins.platform import kv_cache

STAGES = {"pipeline_parallel_size": 2}


class DecodeOptions(BenchOptions):
    """Batches that are decoded offline."""

    benchmark = "decode"
    apart = BenchOptions.apart | {"batch_sizes"}

    batch_sizes: Annotated[tuple[int, ...], COMMAS] = Field(
        (1, 2, 4, 8, 16), min_length=1, description="requests decoded together"
    )
    prompt_tokens: int = Field(64, ge=1, description="most tokens a prompt")
    new_tokens: int = Field(128, ge=8, description="tokens each request generates")

    @field_validator("batch_sizes")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError("a batch holds at least one request")
        return value

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What every contender's engine is started with."""
        return {
            "model": self.model, "dtype": self.dtype, "enforce_eager": self.eager, "seed": self.seed,
            "trust_remote_code": self.trust_remote_code, "max_num_seqs": max(self.batch_sizes),
            "max_model_len": self.prompt_tokens + self.new_tokens + 32, "max_num_batched_tokens": 1024,
            **kv_cache(self.kv_cache_gib), "enable_prefix_caching": False,
            **json.loads(self.engine),
        }  # fmt: skip


class ClosedLoopOptions(LoopOptions, DecodeOptions):
    """Batches that engines of one process decode side by side, a few steps at a time."""

    benchmark = "closed_loop"

    rounds: int = Field(12, ge=1, description="pairs of turns of each contender at each load")
    batch_sizes: Annotated[tuple[int, ...], COMMAS] = Field(
        (1, 2, 4, 8, 16, 32), min_length=1, description="requests decoded together"
    )
    prompt_tokens: int = Field(128, ge=1, description="most tokens a prompt")
    new_tokens: int = Field(600, ge=64, description="tokens of a request after which its batch begins anew")
    warm_up: int = Field(256, ge=0, description="steps of each engine before the first turn at a load")
    always: bool = Field(False, description="heads draft in every step, whether or not it pays")
    rounds_a_text: int = Field(0, ge=0, description="rounds after which the next prompt is decoded (0: one for all)")
    verified: int = Field(
        0, ge=0, description="one more engine of vLLM alone decodes so many of each prompt (0: none): what verifying "
        "costs, for plan_check"
    )  # fmt: skip
    out: str = Field("closed_loop.json", description="results; a run adds to those that are there")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if 2 * (self.steps + 1) > self.new_tokens:
            raise ValueError("a pair of turns does not fit --new-tokens; give fewer steps")
        return self


class GroupOptions(DecodeOptions):
    """What is compared: the base is vLLM's own two pipeline stages."""

    candidates: Annotated[tuple[int, ...], COMMAS] = Field(
        (1, 3, 5), min_length=1, description="candidates at once, a contender each"
    )
    micro_steps: int = Field(
        8, ge=2, le=17, description="micro-steps of a step: the most tokens that a request gets from one"
    )
    exit_layer: int | None = Field(
        None, ge=1, description="layer at which the stages are split (none: heads decide, or the middle)"
    )
    batch_sizes: Annotated[tuple[int, ...], COMMAS] = Field((1,), min_length=1, description="requests decoded together")

    @property
    def engine_arguments(self) -> dict[str, Any]:
        return STAGES | super().engine_arguments
