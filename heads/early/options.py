# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train early`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.comma_lists import Integers
from vllm_ppd.heads.training.options import TrainingOptions

PPD = {"learning_rate": 2e-5, "batch_size": 128, "epochs": 3.0, "warmup": 0.04}  # Table 4


class EarlyOptions(TrainingOptions):
    """`ppd train early`: a head at every exit layer, all in one pass over a frozen target."""

    kind: ClassVar[str] = "early"

    learning_rate: float = Field(
        5e-3, gt=0, description="peak learning rate (ParaDecode, appendix C: 5e-3; 2e-5 in PPD's recipe)"
    )
    exit_layers: Integers = Field((), description="exit layers to train; none names all of 1..L-1")
    head: Literal["transform", "classifier"] = Field(
        "transform",
        description="E* T with a d x d matrix T (ParaDecode), or a whole classifier an exit, hidden size x vocabulary "
        "numbers each (PPD; with --loss ce at its rate 2e-5, batch 128 and 3 epochs by default)",
    )
    loss: Literal["kl", "ce"] = Field(
        "kl", description="KL to the final layer (ParaDecode), or cross-entropy of the next token (PPD, Table 4)"
    )

    vocabulary_sample: int = Field(
        0,
        ge=0,
        description="tokens that a transform's loss reads: the most frequent ones, the batch's, and a weighted sample "
        "of the others (0: the whole vocabulary)",
    )
    position_share: float = Field(1.0, gt=0, le=1, description="share of the positions that a step learns from")

    @model_validator(mode="before")
    @classmethod
    def _classifiers_as_published(cls, values: Any) -> Any:
        """PPD's own settings (its Table 4) for its own head and loss, where the user names none."""
        if isinstance(values, dict) and (values.get("head"), values.get("loss")) == ("classifier", "ce"):
            return {**PPD, **values}
        return values

    @model_validator(mode="after")
    def _sampled(self) -> EarlyOptions:
        if self.vocabulary_sample and self.head == "classifier":
            raise ValueError("vocabulary_sample is for transforms; whole classifiers learn all their rows: set it to 0")
        return self
