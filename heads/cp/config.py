# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a CP head."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes


class CPConfig(HeadsConfig):
    """A CP head of rank r over n positions."""

    kind: ClassVar[str] = "cp"
    architecture: ClassVar[str] = "CPHead"

    positions: int = Field(ge=2, le=17, description="n: positions of the joint; position 1 is the verified token")
    rank: int = Field(ge=1, le=64, description="r: rank-1 terms, the experts of the mixture")
    factorised: bool = Field(True, description="W = E* T instead of a whole V x E matrix a position and expert")
    condition: Literal["none", "token", "chain"] = Field(
        "none", description="what the experts read beside the state: the newest token, and the draft before"
    )
    token_counts: bool = Field(False, description="the tokens of the training data are counted, for a draft vocabulary")

    @model_validator(mode="after")
    def _enough_positions(self) -> CPConfig:
        if self.num_speculative_tokens > self.positions - 1:
            raise ValueError(
                f"{self.num_speculative_tokens} drafts need {self.num_speculative_tokens + 1} positions, "
                f"not {self.positions}"
            )
        if self.condition == "chain" and self.positions < 3:
            raise ValueError("condition 'chain' needs 3 positions at least; use 'token'")
        if self.condition != "none" and not self.factorised:
            raise ValueError(f"condition {self.condition!r} needs factorised heads")
        return self

    def describe(self) -> str:
        form = "factorised" if self.factorised else "full"
        reads = "" if self.condition == "none" else f", condition {self.condition}"
        return f"rank {self.rank} over {self.positions} positions, {form}{reads}"

    @property
    def factors(self) -> int:
        """Positions that the experts predict: all, or those after the newest token where that is read."""
        return self.positions - (self.condition != "none")

    @property
    def max_drafts(self) -> int:
        return self.positions - 1

    def shapes(self) -> Shapes:
        size, n, r = self.target.hidden_size, self.positions, self.rank
        name, rows = ("cp.transforms", size) if self.factorised else ("cp.classifiers", self.target.vocab_size)
        found = {"cp.gate": [r, size], name: [self.factors, r, rows, size]}
        if self.condition != "none":
            found |= {"cp.token_gate": [r, size], "cp.token": [n - 1, size, size]}
        if self.condition == "chain":
            found["cp.previous"] = [n - 2, size, size]
        return found | ({"token_counts": [self.target.vocab_size]} if self.token_counts else {})

    @property
    def counts_tensor(self) -> str | None:
        return "token_counts" if self.token_counts else None
