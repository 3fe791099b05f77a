# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd calibrate`, declared once."""

from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_ppd.heads.comma_lists import Shares, Sizes


class CalibrationOptions(BaseModel):
    """What to measure heads on, and how much of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    heads: str = Field(description="heads folder to measure; calibration.json is written into it")
    data: tuple[str, ...] = Field(
        min_length=1, description="text that the heads were not trained on: .jsonl, .json, plain text, or folders"
    )
    model: str | None = Field(
        None, validation_alias=AliasChoices("model", "target"), description="target (default: that of the heads)"
    )
    prompts: int = Field(64, ge=1, description="number of prompts, from records or from the middle of texts")
    prompt_tokens: int = Field(64, ge=1, description="length of a prompt taken from a text, in tokens")
    new_tokens: int = Field(128, ge=2, description="tokens the target writes after each prompt")
    temperature: float = Field(0.8, gt=0, description="temperature of the sampled texts; others are greedy")
    drafts: int = Field(5, ge=1, le=16, description="most drafts per step to consider")
    ks: Sizes = Field((1, 3, 5), description="values of k for which match rates are measured")
    batch_sizes: Sizes = Field((1, 2, 4, 8, 16), description="batch sizes to time")
    eps: Shares = Field((0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0), description="values of eps_b for DynaMo's PPL_d")
    alphas: Shares = Field(
        (0.0, 0.5, 1.0), description="alpha_c of DynaMo's co-occurrence mask (eq. 6) to compare on sampled texts"
    )
    batch: int = Field(16, ge=1, description="texts computed together")
    recommend: bool = Field(True, description="write the recommended exit layer and drafts into the heads' config")
    precision: Literal["bfloat16", "float32"] = Field("float32", description="dtype in which the target computes")
    seed: int = Field(0, description="seed of the sampled texts")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
