# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench acceptance`, declared once."""

from typing import Annotated, Any

from pydantic import Field

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.harness.options import Dtype, named
from vllm_ppd.heads.comma_lists import COMMAS


class AcceptanceOptions(DecodeOptions):
    """All prompts of a file, decoded by one contender after the other."""

    benchmark = "acceptance"
    apart = DecodeOptions.apart - {"batch_sizes", "drafts"}

    drafts: int = Field(3, ge=1, le=16, description="drafts per step of every contender, made in every step")
    temperatures: Annotated[tuple[float, ...], COMMAS] = Field((0.0, 0.8), description="measure at each of these")
    new_tokens: int = Field(64, ge=8, description="tokens each request generates")
    prompt_tokens: int = Field(1536, ge=1, description="most tokens of a prompt; longer prompts are skipped")
    prompts: int | None = Field(None, ge=1, description="most prompts, from all categories in turn (default: all)")
    batch_sizes: Annotated[tuple[int, ...], COMMAS] = Field(
        (16,), min_length=1, max_length=1, description="requests decoded together"
    )
    dtype: Dtype = Field("float32", description="dtype of the engines")
    eager: bool = Field(True, description="without compilation, which starts faster and runs slower")
    out: str = Field("acceptance.json", description="file of results; a stopped run continues there")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(named(task)[1] for task in self.data)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        cached = {"max_num_batched_tokens": 4096, "enable_prefix_caching": True}
        return {**super().engine_arguments, **cached, **self.engine}
