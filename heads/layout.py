# SPDX-License-Identifier: Apache-2.0
"""speculators' layout of a `config.json`: the keys that every kind of heads has there."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ppd.heads.fingerprint import TargetFingerprint

MOST_DRAFTS = 16  # a step
LARGEST_BATCH = 2**31 - 1  # stands for no limit

TargetName = Annotated[str, Field(min_length=1, max_length=4096, description="name or path of the target")]
Drafts = Annotated[int, Field(ge=1, le=MOST_DRAFTS)]


class TargetLayers(BaseModel):
    """What the heads need to know of the target; speculators calls it `transformer_layer_config`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model_type: str
    hidden_size: int = Field(ge=1, le=1 << 20)
    vocab_size: int = Field(ge=1, le=1 << 26)
    num_hidden_layers: int = Field(ge=2, le=4096)


class Proposal(BaseModel):
    """One way of drafting that the heads recommend."""

    model_config = ConfigDict(strict=True)
    speculative_tokens: Drafts


class Verifier(BaseModel):
    """The target."""

    model_config = ConfigDict(strict=True)
    name_or_path: TargetName


class Speculators(BaseModel):
    """`speculators_config`."""

    model_config = ConfigDict(strict=True)
    proposal_methods: list[Proposal] = Field(min_length=1, max_length=16)
    verifier: Verifier


class Calibrated(BaseModel):
    """What `ppd calibrate` found on one device, and holds there alone."""

    model_config = ConfigDict(extra="forbid", strict=True)
    device: str = Field(min_length=1, max_length=200, description="name of the device that was measured")
    num_speculative_tokens_per_batch_size: list[
        Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_BATCH)]], Field(min_length=3, max_length=3)]
    ] = Field(min_length=1, max_length=1024, description="[first batch size, last one, drafts], as vLLM takes it")

    @model_validator(mode="after")
    def _in_order(self) -> Calibrated:
        expected = 1
        for first, last, drafts in self.num_speculative_tokens_per_batch_size:
            if first != expected or last < first or drafts > MOST_DRAFTS:
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size must have ranges from 1 on without gaps, and at most "
                    f"{MOST_DRAFTS} drafts"
                )
            expected = last + 1
        return self


class Layout(BaseModel):
    """The keys of all kinds; those of a kind stand beside them."""

    model_config = ConfigDict(strict=True)
    speculators_config: Speculators
    transformer_layer_config: TargetLayers
    draft_vocab_size: int | None = None
    dtype: str = "float32"
    fingerprint: TargetFingerprint | None = None
    calibration: Calibrated | None = None
