# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train dynamo`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from vllm_ppd.heads.training.options import DistillationOptions


class DynaMoOptions(DistillationOptions):
    """`ppd train dynamo`: token heads of one decoder layer each, and co-occurrence masks of the same data."""

    kind: ClassVar[str] = "dynamo"

    learning_rate: float = Field(1e-3, gt=0, description="LR_M, peak rate of the token heads (Table 5)")
    warmup: float = Field(0.01, ge=0, lt=1, description="share of the steps in which the rate rises (A.1: 1 %)")
    tokens: int = Field(3, ge=2, le=4, description="n of DynaMo-Tn: heads 2..n are trained")
    num_speculative_tokens: int = Field(2, ge=1, le=3, description="drafts a step the heads recommend")
    recipe: Literal["heads", "full"] = Field(
        "heads", description="train the heads alone, or the base model with them (the paper; writes OUT/base)"
    )
    base_learning_rate: float = Field(1e-5, ge=0, description="LR_B, peak rate of the base model, full recipe")
    stem_learning_rate: float = Field(1e-6, ge=0, description="LR_MB, rate of the heads' gradients into the stem")
    start: Literal["random", "copy"] = Field(
        "copy", description="where a head starts: random weights (the paper), or the target's last layer"
    )
    vocabulary_sample: int = Field(
        0, ge=0, description="tokens of the vocabulary that the token heads' loss reads: as `ppd train early` (0: all)"
    )
    position_share: float = Field(1.0, gt=0, le=1, description="share of the positions that each head learns from")
    mask_entries: int = Field(200_000, ge=0, description="co-occurring n-grams kept an order; 0 leaves the mask out")
