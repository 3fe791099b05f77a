# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train`, declared once: flags, help and errors are made from them.

Defaults are the paper's if it names one; `source` notes are part of the description.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_ppd.heads.text import COMMAS


class TrainingOptions(BaseModel):
    """Options that all kinds of heads share."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str]

    model: str = Field(
        description="target: a causal LM folder or hub name that transformers can load"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description=".jsonl or .json files (ppd data's, or text, chats, prompts, "
        "completions), plain text, or folders",
    )
    out: str = Field(
        description=(
            "heads folder to write; a stopped run continues from its checkpoint there"
        )
    )
    train_on_prompts: bool = Field(
        False,
        description="include prompts in the loss if the data separates prompts from "
        "responses",
    )
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(
        None, ge=1, description="optimiser steps (default: set by --epochs)"
    )
    sequence_length: int = Field(
        1024, ge=8, description="tokens per packed window"
    )
    batch_size: int = Field(
        16, ge=1, description="windows per optimiser step, over all processes"
    )
    accumulation: int = Field(
        1,
        ge=1,
        description="parts in which a step's windows are computed, to save memory",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="AdamW (the papers), or Muon for the heads' matrices and AdamW "
        "for the rest",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="peak learning rate of the heads"
    )
    warmup: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="share of the steps with a rising rate; a cosine follows",
    )
    betas: Annotated[tuple[float, float], COMMAS] = Field(
        (0.9, 0.95),
        description="AdamW's betas (DynaMo, A.1; the others name none); the first is "
        "Muon's momentum",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    gradient_clip: float = Field(
        1.0,
        gt=0,
        description="largest gradient norm, separately for heads and base model",
    )
    position_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the positions from which a step learns",
    )
    precision: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="dtype of the target and of autocast; the heads' master weights "
        "stay float32",
    )
    stored_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of the saved heads"
    )
    held_out: float = Field(
        0.02,
        gt=0,
        lt=0.5,
        description="share of the prompts and texts held out for evaluation",
    )
    evaluation_tokens: int = Field(
        65_536, ge=1, description="held-out tokens that an evaluation reads"
    )
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="steps between further evaluations; the weights of the best one "
        "are written",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this many evaluations without 0.1 % more accepted "
        "held-out drafts",
    )
    states_cache: str | None = Field(
        None,
        description="folder that caches the frozen target's states for further "
        "epochs and runs on the data",
    )
    states_cache_gb: float = Field(
        20.0, gt=0, description="size limit of that folder in GB"
    )
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    num_speculative_tokens: int = Field(
        3, ge=1, le=16, description="drafts per step that the heads recommend"
    )
    seed: int = Field(
        0, description="seed of the initial heads and of the order of the data"
    )
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one",
    )
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model"
    )
    license: str = Field(
        "other",
        pattern=r"^[a-z0-9.-]+$",
        description="licence of the heads for their model card, as the Hub names it, "
        "such as apache-2.0",
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and below 1")
        return value

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        free = {
            "out",
            "save_every",
            "device",
            "evaluation_tokens",
            "license",
            "states_cache_gb",
            "learning_rate",
            "base_learning_rate",
            "stem_learning_rate",
        }
        options = self.model_dump(mode="json", exclude=free)
        # Without a cache, the windows of later epochs start elsewhere.
        options["states_cache"] = self.states_cache is not None
        return {"kind": self.kind, **options}


class FullOptions(TrainingOptions):
    """Options of heads that also learn the target's distribution, and may train the target."""

    recipe: Literal["heads", "full"] = Field(
        "heads",
        description="train the heads alone, or the base model with them (the papers; "
        "writes OUT/base)",
    )
    base_learning_rate: float = Field(
        1e-5,
        ge=0,
        description="peak learning rate of the base model (full recipe)",
    )
    distillation: float = Field(
        1.0,
        ge=0,
        le=1,
        description="weight of distillation, the cross-entropy to the target's top-k "
        "probabilities; the rest is the negative log-likelihood of the data",
    )
    distillation_top_k: int = Field(
        16, ge=1, le=256, description="number of likeliest tokens to distil"
    )
