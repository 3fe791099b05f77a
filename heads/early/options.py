# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train early`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from vllm_ppd.heads.training.options import TrainingOptions, split


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
    def _layers(cls, value: Any) -> Any:
        return split(value)
