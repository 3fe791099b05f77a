# SPDX-License-Identifier: Apache-2.0
"""`config.json` of DynaMo token heads."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.dynamo.joint_settings import JointSettings

LAYER_TENSOR = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"  # as modules and parameters are named

LayerTensors = Annotated[
    dict[
        Annotated[str, Field(pattern=LAYER_TENSOR, max_length=200)],
        Annotated[list[Annotated[int, Field(ge=1, le=1 << 30)]], Field(min_length=1, max_length=4)],
    ],
    Field(min_length=1, max_length=4096),
]


class DynaMoConfig(HeadsConfig):
    """DynaMo token heads 2..n, one decoder layer each, and the co-occurrence counts of their mask."""

    kind: ClassVar[str] = "dynamo"
    architecture: ClassVar[str] = "DynaMoHeads"

    tokens: int = Field(ge=2, le=4, description="n: tokens of the joint; head 1 is the target itself")
    layer_tensors: LayerTensors = Field(
        description="tensors of one token head, as the target's own decoder layer names them"
    )
    # JSON's keys are strings.
    cooccurrence_entries: dict[Annotated[int, Field(strict=False)], Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="n-grams counted, by order"
    )
    sampling: JointSettings = Field(
        default_factory=lambda: JointSettings.model_validate({}), description="settings of the joint"
    )

    @model_validator(mode="after")
    def _enough_heads(self) -> DynaMoConfig:
        if self.num_speculative_tokens > self.tokens - 1:
            raise ValueError(f"{self.num_speculative_tokens} drafts need {self.num_speculative_tokens} token heads")
        return self

    @model_validator(mode="after")
    def _sound_tensors(self) -> DynaMoConfig:
        size, orders = self.target.hidden_size, set(range(2, self.tokens + 1))
        if not any(size in shape for shape in self.layer_tensors.values()):
            raise ValueError(f"layer_tensors has no tensor of the hidden size {size}, as every decoder layer has")
        if self.cooccurrence_entries and set(self.cooccurrence_entries) != orders:
            raise ValueError(f"cooccurrence_entries must count n-grams of orders 2 to {self.tokens}, or none")
        if self.cooccurrence_entries and self.target.vocab_size**self.tokens >= 2**63:
            raise ValueError(f"n-grams of {self.tokens} of {self.target.vocab_size} tokens do not fit 63 bits")
        return self

    def describe(self) -> str:
        masks = f"masks of order {', '.join(map(str, self.cooccurrence_entries))}" if self.cooccurrence_entries else ""
        return f"T{self.tokens}, {masks or 'no masks'}"

    @property
    def max_drafts(self) -> int:
        return self.tokens - 1

    @property
    def counts_tensor(self) -> str | None:
        return "cooccurrence.unigram" if self.cooccurrence_entries else None

    def shapes(self) -> Shapes:
        found = {
            f"head.{token}.{name}": shape
            for token in range(2, self.tokens + 1)
            for name, shape in self.layer_tensors.items()
        }
        if self.cooccurrence_entries:
            found |= {"cooccurrence.unigram": [self.target.vocab_size], "cooccurrence.totals": [self.tokens]}
            for order, entries in self.cooccurrence_entries.items():
                found |= {f"cooccurrence.{order}.keys": [entries], f"cooccurrence.{order}.counts": [entries]}
        return found
