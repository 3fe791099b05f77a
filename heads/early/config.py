# SPDX-License-Identifier: Apache-2.0
"""Early heads: `config.json`, the options of their training, what calibration stores,
and what drafting costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from vllm_ppd.heads.base import CountedHeads, Shapes
from vllm_ppd.heads.options import HeadsOptions
from vllm_ppd.heads.planning import (
    ByTexts,
    Counts,
    Number,
    Parts,
    Setting,
    Share,
    Stored,
    sampled,
)
from vllm_ppd.heads.text import Integers, quoted

# Table 4
PPD = {
    "optimizer": "adamw",
    "learning_rate": 2e-5,
    "batch_size": 128,
    "epochs": 3.0,
    "warmup": 0.04,
}
# Depths of default exits: parts of the target's layers
DEPTHS = (16, 12, 10, 8, 6, 5, 4, 3)
TRAINED = "Y"  # PPD's "trained" column; earlier calibrations also have "N"
Layers = Annotated[list[int], Field(max_length=4096)]
Layer = Annotated[int, Field(ge=1, le=4096, strict=False)]
ByLayer = dict[Layer, list[Counts]]
Rates = dict[Number, dict[str, list[Share]]]  # k -> form -> rate of each layer


class EarlyOptions(HeadsOptions):
    """`ppd train early`: a head at every exit layer, all in one pass over a frozen target."""

    kind = "early"

    exit_layers: Integers = Field(
        (),
        description="exit layers to train (default: up to eight from a sixteenth to a "
        "third of the depth; a worker group needs one in the deeper half)",
    )
    head: Literal["transform", "classifier"] = Field(
        "transform",
        description="E* T with a d x d matrix T, by KL to the final layer (ParaDecode), "
        "or a classifier per exit with hidden size x vocabulary numbers, by "
        "cross-entropy of the next token (PPD; by default with AdamW at its rate 2e-5, "
        "batch 128 and 3 epochs)",
    )

    @model_validator(mode="before")
    @classmethod
    def _classifiers_as_published(cls, values: Any) -> Any:
        """Default to PPD's settings (its Table 4) for PPD's head."""
        if isinstance(values, dict) and values.get("head") == "classifier":
            return {**PPD, **values}
        return values

    @model_validator(mode="after")
    def _whole_classifiers(self) -> Self:
        if self.head == "classifier" and self.train_vocab_size:
            raise ValueError(
                "classifiers are trained over the whole vocabulary; omit "
                "--train-vocab-size"
            )
        return self


class Matches(Stored):
    """p(layer, k) on greedy texts, and expected acceptance with 1, 2, ... drafts at
    each exit.
    """

    layers: list[Layer] = Field(min_length=1)
    match: Rates
    acceptance: ByTexts[dict[str, ByLayer]]
    # On sampled texts, by the size of the draft vocabulary
    vocabulary: dict[Number, ByLayer] = Field(default_factory=dict)


class EarlyParts(Parts):
    """What `ppd calibrate` stores of early heads."""

    matches: Matches


class EarlyConfig(CountedHeads):
    """Early heads: per exit layer a d x d matrix T (ParaDecode) or a whole classifier
    (PPD, rows "Y").
    """

    kind = "early"
    architecture = "EarlyHeads"
    options = EarlyOptions
    parts = EarlyParts
    tensor_names = r"exit\.\d+\.(transform|classifier)$"

    exit_layers: Layers = Field(
        min_length=1, description="exit layers that have a head"
    )
    default_exit_layers: Layers = Field(
        default_factory=list,
        description="exit layers that draft by default, the best one first; the "
        "engine chooses among them (empty: the one nearest the middle)",
    )
    head: Literal["transform", "classifier"] = "transform"

    @model_validator(mode="after")
    def _known_exits(self) -> EarlyConfig:
        last = self.target.num_hidden_layers - 1
        for name in ("exit_layers", "default_exit_layers"):
            layers = getattr(self, name)
            outside = [layer for layer in layers if not 1 <= layer <= last]
            if outside:
                raise ValueError(
                    f"{name} names layer {quoted(outside[0])}, outside 1..{last}"
                )
            if len(set(layers)) < len(layers):
                raise ValueError(f"{name} names a layer twice")
        headless = set(self.default_exit_layers) - set(self.exit_layers)
        if headless:
            raise ValueError(
                f"default_exit_layers names layer {min(headless)}, which has no head"
            )
        return self

    @property
    def serving_exits(self) -> tuple[int, ...]:
        """The exits that draft by default."""
        middle = self.target.num_hidden_layers / 2
        nearest = min(
            self.exit_layers, key=lambda layer: (abs(layer - middle), layer)
        )
        return tuple(self.default_exit_layers or [nearest])

    @property
    def recommended(self) -> dict[str, Any]:
        return {**super().recommended, "exit_layer": [*self.serving_exits]}

    def describe(self) -> str:
        return f"a {self.head} at {len(self.exit_layers)} exit layers"

    def shapes(self) -> Shapes:
        size = self.target.hidden_size
        rows = size if self.head == "transform" else self.target.vocab_size
        shapes = {
            f"exit.{layer}.{self.head}": [rows, size]
            for layer in self.exit_layers
        }
        return shapes | self.counts_shape()

    def settings(self, parts: EarlyParts) -> Iterator[Setting]:
        """n drafts at layer l read n l layers, n transforms, and n times the LM head's
        rows of the draft vocabulary.

        Bytes are counted here. The exits beside the best one are served, too, since the
        engine measures seconds.
        """
        transform = parts.timing.transform_in_layers
        matrices = transform if self.head == "transform" else 0.0
        by_size = {
            None: sampled(parts.matches.acceptance)[TRAINED]
        } | parts.matches.vocabulary
        for size, by_layer in by_size.items():
            share = 1.0 if size is None else size / self.target.vocab_size
            measured = sorted(by_layer)
            for place, layer in enumerate(measured):
                beside = measured[max(0, place - 1) : place + 2]
                beside.remove(layer)
                for drafts, counts in enumerate(by_layer[layer], start=1):
                    options = {
                        "default_exit_layers": [layer, *beside],
                        "num_speculative_tokens": drafts,
                        "draft_vocab_size": size,
                    }
                    layers = drafts * (layer + matrices)
                    yield Setting(options, counts.length, layers, drafts * share)
