# SPDX-License-Identifier: Apache-2.0
"""Options that all benchmarks share, declared once."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, field_validator, model_validator
from typing_extensions import Self

from vllm_ppd.heads.comma_lists import COMMAS

Plain = Literal["ppd", "ngram", "suffix"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Temperature = Annotated[float, Field(ge=0)]
NONE = BeforeValidator(lambda value: () if value == "none" else value)  # 'none' is an empty list
PLAIN = (
    "contenders without a checkpoint: ppd without heads, vLLM's n-gram, and its suffix decoding if "
    "arctic-inference is installed; 'none' omits all"
)


def named(text: str) -> tuple[str, str]:
    """The name and the file of NAME=FILE, or of FILE."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and "/" not in name else (Path(text).stem, text)


class BenchOptions(BaseModel):
    """Options for the contenders, the prompts, and the number of turns."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    benchmark: ClassVar[str]  # the benchmark's name in files of results
    # Options that may differ between turns that are summarised together.
    apart: ClassVar[frozenset[str]] = frozenset({
        "heads", "plain", "eagle", "draft_model", "also", "drafts", "rounds", "temperatures", "alive",
        "together", "out",
    })  # fmt: skip

    model: str = Field(description="target")
    data: tuple[str, ...] = Field(
        min_length=1, description="prompts: .jsonl or .json with text, chats or prompt_token_ids; plain text; folders"
    )
    heads: tuple[str, ...] = Field((), description="heads folders, each of them a contender")
    plain: Annotated[tuple[Plain, ...], COMMAS, NONE] = Field(("ppd", "ngram", "suffix"), description=PLAIN)
    eagle: str | None = Field(
        None, description="checkpoint of an EAGLE or EAGLE-3 head, for vLLM's method of that name"
    )
    draft_model: str | None = Field(None, description="small model, for vLLM's method draft_model")
    also: tuple[str, ...] = Field(
        (), description="further contenders, NAME={speculative config as JSON}; the keys 'engine' and 'environment' "
        "hold engine arguments and environment variables"
    )  # fmt: skip
    drafts: int | None = Field(
        None, ge=1, le=16, description="drafts per step of every contender (default: what heads recommend, else 3)"
    )
    rounds: int = Field(5, ge=1, description="turns of each contender at each load")
    temperature: Temperature = Field(0.0, description="0 decodes greedily")
    temperatures: Annotated[tuple[Temperature, ...], COMMAS] = Field(
        (), description="measure at each of these temperatures with the same engines; each is a run"
    )
    dtype: Dtype = Field("auto", description="dtype of the engines")
    eager: bool = Field(False, description="run without compilation, which starts faster and runs slower")
    kv_cache_gib: float = Field(1.0, gt=0, description="GiB of KV cache per engine")
    engine: Json[dict[str, Any]] = Field({}, description="further engine arguments of all contenders, as JSON")
    alive: int | None = Field(
        None, ge=2, description="engines alive at once (default: as many as fit in memory); only one computes at a time"
    )
    together: bool = Field(
        False, description="start engines that are alive at once together, if cores and memory suffice; engines "
        "that time their steps then do so during the others' start"
    )  # fmt: skip
    seed: int = Field(0, ge=0, description="seed of the engines and of random choices")
    out: str = Field("bench.json", description="file of results; a run adds to its results")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")

    @field_validator("temperatures")
    @classmethod
    def _distinct(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each temperature must be given once")
        return value

    @model_validator(mode="after")
    def _room_is_known(self) -> Self:
        if self.together and self.alive is None:
            raise ValueError("--together needs --alive, as it is not known in advance how many engines fit")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """The data files, which are checked before an engine starts."""
        return self.data

    @property
    def runs(self) -> list[Self]:
        """The options of each run."""
        return [self.model_copy(update={"temperature": value}) for value in self.temperatures or (self.temperature,)]

    def essence(self) -> dict[str, Any]:
        """The options that turns must share to be summarised together; contenders are identified separately."""
        return self.model_dump(mode="json", round_trip=True, exclude=set(self.apart))
