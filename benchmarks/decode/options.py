# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench decode`, declared once."""

from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import Self

from vllm_ppd.benchmarks.harness.options import BenchOptions
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.vllm_plugins.platform import kv_cache


class DecodeOptions(BenchOptions):
    """Batches that are decoded offline."""

    benchmark = "decode"
    apart = BenchOptions.apart | {"batch_sizes", "group", "traces"}

    batch_sizes: Annotated[tuple[PositiveInt, ...], COMMAS] = Field(
        (1, 2, 4, 8, 16), min_length=1, description="requests decoded together"
    )
    prompt_tokens: int = Field(64, ge=1, description="most tokens of a prompt")
    new_tokens: int = Field(128, ge=8, description="tokens that each request generates")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of sampling")
    turn_steps: int | None = Field(
        None, ge=1, description="steps of a turn after which the next engine continues with its batch until a request "
        "ends; the machine's speed drifts less in a short round (default: turns of a whole batch)"
    )  # fmt: skip
    traces: tuple[str, ...] = Field(
        (), description="contenders of which torch's profiler writes a trace of steps at each load, beside --out"
    )  # fmt: skip
    group: Annotated[tuple[PositiveInt, ...], COMMAS] = Field(
        (), description="preset: worker groups with these numbers of candidates, and two tensor-parallel ranks, over "
        "vLLM's two pipeline stages as the base; --heads is the groups' folder of early heads"
    )  # fmt: skip

    @model_validator(mode="after")
    def _stages_spin(self) -> Self:
        if self.group and self.turn_steps is not None:
            raise ValueError("--turn-steps: vLLM's ranks spin for a second after a step; leave it out with --group")
        return self

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Engine arguments of every contender."""
        return {
            "model": self.model, "dtype": self.dtype, "enforce_eager": self.eager, "seed": self.seed,
            "trust_remote_code": self.trust_remote_code, "max_num_seqs": max(self.batch_sizes),
            "max_model_len": self.prompt_tokens + self.new_tokens + 32, "max_num_batched_tokens": 1024,
            **kv_cache(self.kv_cache_gib), "enable_prefix_caching": False,
            **self.engine,
        }  # fmt: skip
