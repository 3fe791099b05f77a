# SPDX-License-Identifier: Apache-2.0
"""What the demo model and its peers share as recipes of `ppd train`'s loop: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field
from torch import nn

from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.target import Target


class ModelOptions(TrainingOptions):
    """How a small model is trained."""

    optimizer: Literal["adamw", "muon"] = "muon"  # which needs a quarter of AdamW's tokens at this size
    learning_rate: float = Field(7e-3, gt=0, description="peak learning rate of Muon: the layers' matrices")
    others_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW: embeddings and vectors")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of the matrices")


class ModelRecipe(Recipe):
    """A small model that is trained."""

    def __init__(self, options: Any, target: Target) -> None:
        super().__init__(options, target)
        self.options = options

    @abstractmethod
    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        matrices = self.matrices()
        others = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return [
            {"params": matrices, "peak": learning_rate},
            {"params": others, "peak": self.options.others_rate, "muon": False, "weight_decay": 0.0},
        ]
