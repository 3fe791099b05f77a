# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd calibrate`, declared once."""

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_ppd.heads.measured import Share
from vllm_ppd.heads.text import COMMAS


class CalibrationOptions(BaseModel):
    """Measure how many drafts of a heads folder are accepted, and store the best setting in it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=()
    )

    heads: str = Field(
        description="heads folder to measure; calibration.json is written into it"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description="text that the heads were not trained on: .jsonl, .json, plain "
        "text, or folders",
    )
    model: str | None = Field(
        None,
        validation_alias=AliasChoices("model", "target"),
        description="target (default: that of the heads)",
    )
    prompts: int = Field(
        64, ge=1, description="number of prompts, from records or pieces of texts"
    )
    prompt_tokens: int = Field(
        64, ge=1, description="length of a prompt taken from a text, in tokens"
    )
    new_tokens: int = Field(
        128, ge=2, description="tokens the target writes after each prompt"
    )
    temperature: float = Field(
        0.8, gt=0, description="temperature of the sampled texts"
    )
    drafts: int = Field(
        5, ge=1, le=16, description="most drafts per step to consider"
    )
    eps: Annotated[tuple[Share, ...], COMMAS] = Field(
        (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
        min_length=1,
        description="DynaMo's back-off thresholds eps_b to compare",
    )
    batch: int = Field(16, ge=1, description="texts computed together")
    recommend: bool = Field(
        True, description="write the best setting into the heads' config"
    )
    precision: Literal["bfloat16", "float32"] = Field(
        "float32", description="dtype in which the target computes"
    )
    seed: int = Field(0, description="seed of the sampled texts")
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one",
    )
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model"
    )
