# SPDX-License-Identifier: Apache-2.0
"""Early heads: `config.json`, the options of their training, and what drafting with them costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.calibration.setting import Setting, Work, on_texts
from vllm_ppd.heads.comma_lists import Integers
from vllm_ppd.heads.quote import quoted
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
    position_share: float = Field(1.0, gt=0, le=1, description="share of the positions that a step learns from")

    @model_validator(mode="before")
    @classmethod
    def _classifiers_as_published(cls, values: Any) -> Any:
        """PPD's own settings (its Table 4) for its own head and loss, where the user names none."""
        if isinstance(values, dict) and (values.get("head"), values.get("loss")) == ("classifier", "ce"):
            return {**PPD, **values}
        return values


class EarlyConfig(HeadsConfig):
    """Early heads: a d x d matrix T (ParaDecode) or a whole classifier (PPD, rows "Y") an exit layer."""

    kind: ClassVar[str] = "early"
    architecture: ClassVar[str] = "EarlyHeads"
    method: ClassVar[str] = "ppd"
    options: ClassVar[type[TrainingOptions]] = EarlyOptions
    tensor_names: ClassVar[str] = r"exit\.\d+\.(transform|classifier)$"

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

    @property
    def recommended(self) -> dict[str, Any]:
        return {**super().recommended, "exit_layer": self.serving_exits}

    def describe(self) -> str:
        return f"a {self.head} at {len(self.exit_layers)} exit layers"

    def work(self, drafts: int, vocabulary: float = 1.0, exit_layer: int | None = None) -> Work:
        """Each draft runs the layers before the exit and reads the LM head, and its transform where it has one."""
        layer = self.serving_exits[0] if exit_layer is None else exit_layer
        return Work(drafts * layer, drafts * (self.head == "transform"), drafts * vocabulary)

    def shapes(self) -> Shapes:
        size = self.target.hidden_size
        rows = size if self.head == "transform" else self.target.vocab_size
        return {f"exit.{layer}.{self.head}": [rows, size] for layer in self.exit_layers}

    def settings(self, parts: dict[str, Any], greedy: bool) -> Iterator[Setting]:
        """Every number of drafts at every exit that was measured, with the heads and without them."""
        transform = parts["timing"].get("transform_in_layers", 0.0)
        for form, by_layer in on_texts(parts["matches"]["acceptance"], greedy).items():
            for layer, by_n in by_layer.items():
                for n, counts in enumerate(by_n, start=1):
                    options = {"default_exit_layers": [int(layer)], "num_speculative_tokens": n}
                    drafted = counts["drafted"] / max(counts["cycles"], 1)
                    work, trained = self.work(n, exit_layer=int(layer)), form == "Y"
                    layers = work.layers + (work.matrices * transform if trained else 0.0)
                    yield Setting(
                        options, n, drafted, counts["length"], layers, work.reads, exit_layer=int(layer),
                        trained=trained,
                    )  # fmt: skip
