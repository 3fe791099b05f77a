# SPDX-License-Identifier: Apache-2.0
"""`config.json` of early heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.quote import quoted


class EarlyConfig(HeadsConfig):
    """Early heads: a d x d matrix T (ParaDecode) or a whole classifier (PPD, rows "Y") an exit layer."""

    kind: ClassVar[str] = "early"
    architecture: ClassVar[str] = "EarlyHeads"

    exit_layers: list[int] = Field(min_length=1, max_length=4096, description="exit layers that have a head")
    default_exit_layers: list[int] = Field(
        default_factory=list,
        max_length=4096,
        description="those that draft by default (empty: the one nearest the middle)",
    )
    head: Literal["transform", "classifier"] = "transform"

    @model_validator(mode="after")
    def _known_exits(self) -> EarlyConfig:
        last = self.target.num_hidden_layers - 1
        for name, layers in (("exit_layers", self.exit_layers), ("default_exit_layers", self.default_exit_layers)):
            outside = [layer for layer in layers if not 1 <= layer <= last]
            if outside:
                raise ValueError(f"{name} names layer {quoted(outside[0])}, outside 1..{last}")
            if len(set(layers)) < len(layers):
                raise ValueError(f"{name} names a layer twice")
        headless = set(self.default_exit_layers) - set(self.exit_layers)
        if headless:
            raise ValueError(f"default_exit_layers names layer {min(headless)}, which has no head")
        return self

    @property
    def serving_exits(self) -> tuple[int, ...]:
        """The exits that draft where the user names none."""
        middle = self.target.num_hidden_layers / 2
        nearest = min(self.exit_layers, key=lambda layer: (abs(layer - middle), layer))
        return tuple(self.default_exit_layers or [nearest])

    def describe(self) -> str:
        return f"a {self.head} at {len(self.exit_layers)} exit layers"

    def shapes(self) -> Shapes:
        size = self.target.hidden_size
        rows = size if self.head == "transform" else self.target.vocab_size
        return {f"exit.{layer}.{self.head}": [rows, size] for layer in self.exit_layers}
