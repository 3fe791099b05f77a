# SPDX-License-Identifier: Apache-2.0
"""Options of the benchmarks, declared once: what all share, and those of `ppd bench decode`."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GATE = 0.01  # of a GPU's memory, which vLLM wants free before it starts; the KV cache's size is given apart from it


class BenchOptions(BaseModel):
    """Who is compared, on which prompts, and how often."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    benchmark: ClassVar[str]  # its name in files of results
    apart: ClassVar[frozenset[str]] = frozenset(
        {"heads", "plain", "medusa", "eagle", "draft_model", "also", "drafts", "rounds", "alive", "out"}
    )  # what turns that are summarised together need not share

    model: str = Field(description="target")
    data: tuple[str, ...] = Field(
        min_length=1, description="prompts: .jsonl or .json with text, chats or prompt_token_ids; plain text; folders"
    )
    heads: tuple[str, ...] = Field((), description="heads folders, a contender each")
    plain: tuple[Literal["ppd", "ngram", "suffix"], ...] = Field(
        ("ppd", "ngram", "suffix"),
        description="contenders that need no checkpoint: ppd without heads, vLLM's n-gram, and its suffix decoding "
        "where arctic-inference is installed; 'none' leaves all out",
    )
    medusa: str | None = Field(None, description="checkpoint of Medusa heads, for vLLM's method medusa")
    eagle: str | None = Field(
        None, description="checkpoint of an EAGLE or EAGLE-3 head, for vLLM's method of that name"
    )
    draft_model: str | None = Field(None, description="small model, for vLLM's method draft_model")
    also: tuple[str, ...] = Field(
        (), description="further contenders, NAME={speculative config as JSON}; its key 'engine' holds engine arguments"
    )
    drafts: int | None = Field(
        None, ge=1, le=16, description="drafts a step of every contender (none: what heads recommend, else 3)"
    )
    rounds: int = Field(5, ge=1, description="turns of each contender at each load")
    temperature: float = Field(0.0, ge=0, description="0 decodes greedily")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="arithmetic")
    eager: bool = Field(False, description="without compilation, which starts faster and runs slower")
    kv_cache_gib: float = Field(1.0, gt=0, description="KV cache of each engine")
    engine: str = Field("{}", description="further engine arguments of all contenders, as JSON")
    alive: int | None = Field(
        None, ge=2, description="engines alive at once (none: as many as memory allows); only one computes at a time"
    )
    seed: int = Field(0, ge=0, description="seed of the engines, and of what is drawn")
    out: str = Field("bench.json", description="results; a run adds to those that are there")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")

    @field_validator("plain", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return () if value == "none" else split(value)

    @field_validator("engine")
    @classmethod
    def _is_object(cls, value: str) -> str:
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from None
        if not isinstance(parsed, dict):
            raise ValueError('must be a JSON object, as {"tensor_parallel_size": 2}')
        return value

    def essence(self) -> dict[str, Any]:
        """What turns must share to be summarised together; contenders are told apart by their own configuration."""
        return self.model_dump(mode="json", exclude=set(self.apart))


class DecodeOptions(BenchOptions):
    """Batches that are decoded offline."""

    benchmark = "decode"
    apart = BenchOptions.apart | {"batch_sizes", "temperatures"}

    batch_sizes: tuple[int, ...] = Field((1, 2, 4, 8, 16), min_length=1, description="requests decoded together")
    prompt_tokens: int = Field(64, ge=1, description="most tokens a prompt")
    new_tokens: int = Field(128, ge=8, description="tokens each request generates")
    temperatures: tuple[float, ...] = Field(
        (), description="decode at each of these with the same engines, instead of at one temperature; a run each"
    )

    @field_validator("batch_sizes", "temperatures", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split(value)

    @field_validator("batch_sizes")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError("a batch holds at least one request")
        return value

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if min(value, default=0) < 0 or len(set(value)) < len(value):
            raise ValueError("temperatures must be 0 or more, each given once")
        return value

    @property
    def runs(self) -> list[DecodeOptions]:
        """The options of each run."""
        return [self.model_copy(update={"temperature": one}) for one in self.temperatures or (self.temperature,)]

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


def kv_cache(gib: float) -> dict[str, Any]:
    """Engine arguments for a KV cache of so many GiB, with which engines start beside others on a GPU.

    vLLM checks at the start that gpu_memory_utilization of a GPU is free, 0.92 of it by default, also where the size of
    the KV cache is given and nothing else comes from that share.
    """
    import torch

    gate = {"gpu_memory_utilization": GATE} if torch.cuda.is_available() else {}
    return {"kv_cache_memory_bytes": int(gib * (1 << 30)), **gate}


def split(value: Any) -> Any:
    """The parts of a list that was written with commas."""
    return tuple(part for part in value.replace(" ", "").split(",") if part) if isinstance(value, str) else value
