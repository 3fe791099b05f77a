# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train cp`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.training.options import DistillationOptions


class CPOptions(DistillationOptions):
    """`ppd train cp`: a CP head of rank r, the target frozen ("head-only" in the paper) or trained along."""

    kind: ClassVar[str] = "cp"

    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="Muon for transforms and AdamW for the others, or AdamW alone (the paper names none)"
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="peak learning rate (the paper names none); larger for what reads embeddings"
    )
    rank: int = Field(3, ge=1, le=64, description="experts of the mixture")
    positions: int = Field(4, ge=2, le=17, description="positions of the joint: one verified token and n-1 drafts")
    condition: Literal["none", "token", "chain"] = Field(
        "token",
        description="what is read beside the state: nothing (the paper), the newest token, each draft before too",
    )
    factorised: bool = Field(True, description="W = E* T; otherwise whole V x E matrices, as the paper measured")
    balance: float = Field(0.1, ge=0, description="weight of the load-balancing loss (eq. 10)")
    start: Literal["ridge", "identity"] = Field(
        "ridge", description="first transforms: a ridge regression of the target's later states, or its own LM head"
    )
    recipe: Literal["heads", "full"] = Field(
        "heads", description="train the head alone, or the base model with it (section 3.1; writes OUT/base)"
    )
    base_learning_rate: float = Field(1e-4, ge=0, description="peak rate of the base model, full recipe")
    base_start: Literal["trained", "random"] = Field(
        "trained", description="weights of the base model, full recipe: as given, or random (the paper: from scratch)"
    )
    train_vocab_size: int = Field(
        0,
        ge=0,
        description="train over the most frequent tokens of the data, and draft from them (0: the whole vocabulary)",
    )
    position_share: float = Field(1.0, gt=0, le=1, description="share of a window's positions that a step trains on")

    @model_validator(mode="after")
    def _fits(self) -> CPOptions:
        if not self.factorised and self.condition != "none":
            raise ValueError("whole classifiers have no condition; add --condition none to --no-factorised")
        if not self.factorised and self.train_vocab_size:
            raise ValueError("whole classifiers are trained over the whole vocabulary; omit --train-vocab-size")
        if self.recipe == "full" and self.train_vocab_size:
            raise ValueError("the full recipe trains the whole LM head; omit --train-vocab-size")
        if self.base_start == "random" and (self.recipe, self.start) != ("full", "identity"):
            raise ValueError("a random base model is trained along; add --recipe full --start identity")
        if self.condition == "chain" and self.positions < 3:
            raise ValueError("condition chain reads the draft before: it needs 3 positions; use --condition token")
        return self
