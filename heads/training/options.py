# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train`, declared once: the flags, their help and the errors come from here.

Defaults are the papers' where the paper says one; `source` notes are part of the description.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


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
