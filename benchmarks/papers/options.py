# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench tables` and `ppd bench acceptance`, declared once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.harness.options import Dtype, named
from vllm_ppd.heads.comma_lists import COMMAS


class TablesOptions(BaseModel):
    """Which tables, on what, and how much of it; the defaults keep everything small."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(description="target")
    task: tuple[str, ...] = Field(
        min_length=1,
        description="NAME=FILE, what to measure on, and not trained on: chats or prompts (.jsonl, .json), or texts; "
        "tables of one task take the first",
    )
    heads: tuple[str, ...] = Field((), description="heads folders; of one kind there may be several (CP ranks)")
    only: Annotated[tuple[str, ...], COMMAS] = Field(
        (), description="tables (ppd-2, paradecode-fig-6) or whole papers (ppd), with commas between; default: all"
    )
    out: str = Field("tables.json", description="results; a run adds to those that are there")
    again: bool = Field(
        False, description="measure tables that are there once more; speeds are summarised with the earlier turns"
    )
    prompts: int = Field(32, ge=1, description="prompts of each task, its categories in turns")
    prompt_tokens: int = Field(64, ge=4, description="tokens of a prompt from the middle of a text")
    longest: int = Field(768, ge=8, description="most tokens of a chat's prompt; longer ones are left out")
    new_tokens: int = Field(128, ge=16, description="tokens written after each prompt")
    temperature: float = Field(0.8, gt=0, description="temperature of the sampled texts, beside the greedy ones")
    rounds: int = Field(8, ge=1, description="turns of each engine, for speeds; a prompt each")
    dtype: Literal["bfloat16", "float32"] = Field("float32", description="arithmetic where no engine is needed")
    engine_dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="arithmetic of engines")
    exit_layer: int | None = Field(None, ge=1, description="exit of ParaDecode's tables (none: the middle one)")
    drafts: int = Field(3, ge=1, le=16, description="drafts a step in ParaDecode's tables")
    draft_model: str | None = Field(None, description="small model, for ParaDecode's rows of SpecDecode")
    eager: bool = Field(True, description="engines without compilation, which start faster and run slower")
    kv_cache_gib: float = Field(0.25, gt=0, description="KV cache of each engine")
    engine: str = Field("{}", description="further engine arguments, as JSON")
    alive: int | None = Field(None, ge=2, description="engines alive at once (none: as many as memory allows)")
    batch: int = Field(16, ge=1, description="texts computed at a time, where no engine is needed")
    seed: int = Field(0, description="seed of sampled texts and engines")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; where no engine is needed")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")

    @property
    def files(self) -> tuple[str, ...]:
        """The tasks' files, to be looked at before the target loads."""
        return tuple(named(task)[1] for task in self.task)

    def essence(self) -> dict[str, Any]:
        """What tables must share to be the same; model, tasks and heads are told apart by their files."""
        left_out = {"model", "task", "heads", "only", "out", "again", "alive", "batch", "device"}
        return self.model_dump(mode="json", exclude=left_out)


class AcceptanceOptions(DecodeOptions):
    """Prompts of a file, all of them, decoded by one contender after the other."""

    benchmark = "acceptance"
    apart = DecodeOptions.apart - {"batch_sizes", "drafts"}

    drafts: int = Field(3, ge=1, le=16, description="drafts a step of every contender; drafts are made in every step")
    temperatures: Annotated[tuple[float, ...], COMMAS] = Field((0.0, 0.8), description="measure at each of these")
    new_tokens: int = Field(64, ge=8, description="tokens each request generates")
    prompt_tokens: int = Field(1536, ge=1, description="most tokens of a prompt; longer ones are left out")
    prompts: int | None = Field(None, ge=1, description="prompts at most, of all categories in turns (none: all)")
    batch_sizes: Annotated[tuple[int, ...], COMMAS] = Field(
        (16,), min_length=1, max_length=1, description="requests decoded together"
    )
    dtype: Dtype = Field("float32", description="arithmetic")
    eager: bool = Field(True, description="without compilation, which starts faster and runs slower")
    out: str = Field("acceptance.json", description="results; a stopped run goes on")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(named(task)[1] for task in self.data)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        cached = {"max_num_batched_tokens": 4096, "enable_prefix_caching": True}
        return {**super().engine_arguments, **cached, **self.engine}
