# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench decode`; this module imports nothing heavy, so that `--help` is quick."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json

from vllm_ppd.heads.text import COMMAS, Integers

Sizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), COMMAS
]
Temperature = Annotated[float, Field(ge=0)]


class DecodeOptions(BaseModel):
    """What is compared, on which prompts, and how often."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=()
    )

    model: str = Field(description="target")
    data: tuple[str, ...] = Field(
        min_length=1,
        description="prompts: .jsonl files with prompt_token_ids, messages, prompt "
        "or text, and optionally category",
    )
    heads: tuple[str, ...] = Field((), description="heads folders, each a system")
    plain: Annotated[tuple[Literal["ppd", "ngram", "none"], ...], COMMAS] = Field(
        ("ppd", "ngram"),
        description="systems without a checkpoint: ppd (prompt lookup) and vLLM's "
        "ngram; none omits both",
    )
    eagle: str | None = Field(
        None,
        description="checkpoint of an EAGLE or EAGLE-3 head, for vLLM's own method",
    )
    also: tuple[str, ...] = Field(
        (),
        description="further systems, NAME={speculative_config as JSON}; its key "
        "'engine' holds engine arguments",
    )
    group: Integers = Field(
        (),
        description="compare worker groups with these numbers of candidates, and two "
        "tensor-parallel ranks, with vLLM's two pipeline stages instead; --heads is "
        "the groups' folder of early heads",
    )
    adaptive: bool | None = Field(
        None,
        description="whether our methods draft adaptively or in every step (default: "
        "as each is configured)",
    )
    drafts: int | None = Field(
        None,
        ge=1,
        le=16,
        description="drafts per step of every system (default: what heads recommend, "
        "else 3)",
    )
    acceptance: bool = Field(
        False,
        description="decode all prompts once, in batches of a category and of the "
        "largest --batch-sizes, with drafts in every step; count accepted drafts and "
        "texts that equal vLLM's",
    )
    prompts: int | None = Field(
        None,
        ge=1,
        description="with --acceptance: most prompts, from the categories in turn "
        "(default: all)",
    )
    batch_sizes: Sizes = Field(
        (1, 2, 4, 8, 16), description="requests decoded together"
    )
    rounds: int = Field(
        5, ge=1, description="turns of each system at each batch size"
    )
    temperatures: Annotated[tuple[Temperature, ...], COMMAS] = Field(
        (0.0,),
        min_length=1,
        description="temperatures, each measured with the same engines; 0 decodes "
        "greedily",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of sampling")
    prompt_tokens: int = Field(
        64,
        ge=4,
        description="most tokens of a prompt; texts are cut, longer prompts and "
        "chats are left out",
    )
    new_tokens: int = Field(
        128, ge=8, description="tokens that each request generates"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the engines"
    )
    eager: bool = Field(
        False,
        description="run without compilation, which starts faster and runs slower",
    )
    kv_cache_gib: float = Field(
        1.0,
        gt=0,
        description="GiB of KV cache per engine; all engines are alive at once",
    )
    engine: Json[dict[str, Any]] = Field(
        {}, description="further engine arguments of all systems, as JSON"
    )
    seed: int = Field(0, ge=0, description="seed of the engines")
    out: str = Field(
        "bench.json",
        description="file of results; the same command continues a stopped run there",
    )
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model"
    )

    def settings(self) -> dict[str, Any]:
        """What a run must share with a stopped one to continue it, apart from the systems."""
        systems = {
            "heads",
            "plain",
            "eagle",
            "also",
            "group",
            "adaptive",
            "drafts",
        }
        return self.model_dump(
            mode="json", exclude=systems | {"rounds", "temperatures", "out"}
        )
