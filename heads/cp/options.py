# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd train cp`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vllm_ppd.heads.training.options import TrainingOptions


class CPOptions(TrainingOptions):
    """`ppd train cp`: a CP head of rank r, the target frozen ("head-only" in the paper)."""

    kind: ClassVar[str] = "cp"

    learning_rate: float = Field(5e-3, gt=0, description="peak learning rate (AdamW; the paper names none)")
    rank: int = Field(3, ge=1, le=64, description="experts of the mixture")
    positions: int = Field(4, ge=2, le=17, description="positions of the joint: one verified token and n-1 drafts")
    factorised: bool = Field(True, description="W = E* T; otherwise whole V x E matrices, as the paper measured")
    balance: float = Field(0.1, ge=0, description="weight of the load-balancing loss (eq. 10)")
