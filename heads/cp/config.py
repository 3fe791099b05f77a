# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a CP head."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes


class CPConfig(HeadsConfig):
    """A CP head of rank r over n positions."""

    kind: ClassVar[str] = "cp"
    architecture: ClassVar[str] = "CPHead"

    positions: int = Field(ge=2, le=17, description="n: positions of the joint; position 1 is the verified token")
    rank: int = Field(ge=1, le=64, description="r: rank-1 terms, the experts of the mixture")
    factorised: bool = Field(True, description="W = E* T instead of a whole V x E matrix a position and expert")
    token_counts: bool = Field(False, description="the tokens of the training data are counted, for a draft vocabulary")

    @model_validator(mode="after")
    def _enough_positions(self) -> CPConfig:
        if self.num_speculative_tokens > self.positions - 1:
            raise ValueError(
                f"{self.num_speculative_tokens} drafts need {self.num_speculative_tokens + 1} positions, "
                f"not {self.positions}"
            )
        return self

    def describe(self) -> str:
        return f"rank {self.rank} over {self.positions} positions, {'factorised' if self.factorised else 'full'}"

    @property
    def max_drafts(self) -> int:
        return self.positions - 1

    def shapes(self) -> Shapes:
        size, n, r = self.target.hidden_size, self.positions, self.rank
        name, rows = ("cp.transforms", size) if self.factorised else ("cp.classifiers", self.target.vocab_size)
        found = {"cp.gate": [r, size], name: [n, r, rows, size]}
        return found | ({"token_counts": [self.target.vocab_size]} if self.token_counts else {})

    @property
    def counts_tensor(self) -> str | None:
        return "token_counts" if self.token_counts else None
