# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train`, declared once: the flags, their help and the errors come from here.

Defaults are the papers' where the paper says one; `source` notes are part of the description.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TrainingOptions(BaseModel):
    """What all kinds of heads share."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    kind: ClassVar[str]

    model: str = Field(description="target: a causal LM folder or hub name that transformers can load")
    data: tuple[str, ...] = Field(
        min_length=1, description=".jsonl or .json files (text, chats, prompt and completion), plain text, or folders"
    )
    out: str = Field(description="heads folder to write; a stopped run continues from what it left there")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(None, ge=1, description="optimiser steps, instead of epochs")
    sequence_length: int = Field(1024, ge=8, description="tokens a packed window")
    batch_size: int = Field(16, ge=1, description="windows an optimiser step, over all processes")
    accumulation: int = Field(1, ge=1, description="parts a step's windows are computed in, to save memory")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of the heads (AdamW)")
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps in which the rate rises; a cosine follows")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    gradient_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="arithmetic of the target and of autocast; the heads' master weights stay float32"
    )
    stored_dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of the saved heads")
    held_out: float = Field(0.02, gt=0, lt=0.5, description="share of the documents kept for the evaluation")
    evaluation_tokens: int = Field(65_536, ge=1, description="held-out tokens the evaluation reads")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="drafts a step the heads recommend")
    seed: int = Field(0, description="seed of the initial heads and of the order of the data")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        free = {"out", "save_every", "device", "evaluation_tokens"}
        return {"kind": self.kind} | self.model_dump(mode="json", exclude=free)


class EarlyOptions(TrainingOptions):
    """`ppd train early`: a head at every exit layer, all in one pass over a frozen target."""

    kind: ClassVar[str] = "early"

    learning_rate: float = Field(5e-3, gt=0, description="peak learning rate (ParaDecode, appendix C: 5e-3)")
    exit_layers: tuple[int, ...] = Field((), description="exit layers to train; none names all of 1..L-1")
    head: Literal["transform", "classifier"] = Field(
        "transform", description="E* T with a d x d matrix T (ParaDecode), or a whole classifier an exit (PPD)"
    )
    loss: Literal["kl", "ce"] = Field(
        "kl", description="KL to the final layer (ParaDecode), or cross-entropy of the next token (PPD, Table 4)"
    )

    @field_validator("exit_layers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part for part in value.replace(" ", "").split(",") if part) if isinstance(value, str) else value


class CPOptions(TrainingOptions):
    """`ppd train cp`: a CP head of rank r, the target frozen ("head-only" in the paper)."""

    kind: ClassVar[str] = "cp"

    learning_rate: float = Field(5e-3, gt=0, description="peak learning rate (AdamW; the paper names none)")
    rank: int = Field(3, ge=1, le=64, description="experts of the mixture")
    positions: int = Field(4, ge=2, le=17, description="positions of the joint: one verified token and n-1 drafts")
    factorised: bool = Field(True, description="W = E* T; otherwise whole V x E matrices, as the paper measured")
    balance: float = Field(0.1, ge=0, description="weight of the load-balancing loss (eq. 10)")


class DynaMoOptions(TrainingOptions):
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
    mask_entries: int = Field(200_000, ge=0, description="co-occurring n-grams kept an order; 0 leaves the mask out")


OPTIONS: dict[str, type[TrainingOptions]] = {cls.kind: cls for cls in (EarlyOptions, CPOptions, DynaMoOptions)}
