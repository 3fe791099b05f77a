# SPDX-License-Identifier: Apache-2.0
"""Token heads: `config.json`, the options of their training, what calibration stores,
and what drafting costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.measured import (
    ByTexts,
    Counts,
    Number,
    Parts,
    Setting,
    Share,
    Stored,
    Work,
    on_texts,
)
from vllm_ppd.heads.training.options import FullOptions, TrainingOptions

if TYPE_CHECKING:
    import numpy as np

# PyTorch's names of modules and parameters
LAYER_TENSOR = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"

LayerTensors = Annotated[
    dict[
        Annotated[str, Field(pattern=LAYER_TENSOR, max_length=200)],
        Annotated[
            list[Annotated[int, Field(ge=1, le=1 << 30)]],
            Field(min_length=1, max_length=4),
        ],
    ],
    Field(min_length=1, max_length=4096),
]


class JointSettings(BaseModel):
    """Settings of the joint; defaults are the paper's (appendix A.1) where it names one."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    # The joint of 4 tokens has k^3 entries per request: 2 million at 128.
    k: int = Field(50, ge=1, le=128, description="top-k of each head")
    alpha_c: float = Field(
        1.0,
        ge=0,
        le=1,
        description="power of the co-occurrence mask (eq. 6); 0 disables it",
    )
    eps_b: float = Field(
        0.5,
        ge=0,
        le=1,
        description="back-off threshold: 0 always takes n tokens, 1 always takes one",
    )
    blur: int = Field(
        3,
        ge=1,
        le=31,
        description="kernel of the blur before Otsu's threshold; 1 disables it",
    )
    adaptive: bool = Field(
        True, description="apply Otsu's threshold after the static one"
    )
    repetition_penalty: float = Field(
        1.0,
        ge=1,
        le=100,
        description="divisor of n-grams that repeat a token (the paper: 1.1, and 100 "
        "in its Fig. 11)",
    )

    @field_validator("blur")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value


class DynaMoOptions(FullOptions):
    """`ppd train dynamo`: token heads of one decoder layer each, and co-occurrence
    counts of the same data.
    """

    kind: ClassVar[str] = "dynamo"

    learning_rate: float = Field(
        1e-3, gt=0, description="LR_M, peak learning rate of the token heads (Table 5)"
    )
    warmup: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="share of the steps with a rising learning rate (A.1: 1 %)",
    )
    tokens: int = Field(
        3, ge=2, le=4, description="n of DynaMo-Tn; heads 2..n are trained"
    )
    num_speculative_tokens: int = Field(
        2, ge=1, le=3, description="drafts per step that the heads recommend"
    )
    stem_learning_rate: float = Field(
        1e-6, ge=0, description="LR_MB, learning rate of the heads in the stem"
    )
    start: Literal["random", "copy"] = Field(
        "copy",
        description="initial weights of a head: random (the paper), or the target's "
        "last layer",
    )
    mask_entries: int = Field(
        200_000,
        ge=0,
        description="co-occurring n-grams to keep per order; 0 disables the mask",
    )


class Row(Counts):
    """Counts of a back-off threshold and a number of drafts."""

    eps_b: Share
    drafts_allowed: int = Field(ge=1, le=16)
    alpha_c: Share | None = None  # earlier calibrations only had the heads' value


class Rows(Stored):
    """Counts by back-off threshold and drafts."""

    rows: list[Row] = Field(min_length=1, max_length=4096)
    repeated_4_grams: Share = 0.0
    covers: Share = 1.0  # share of the training text that the draft vocabulary covers


class DynaMoParts(Parts):
    """What `ppd calibrate` stores of token heads."""

    likelihood: dict[str, Any] = Field(default_factory=dict)
    dynamic: dict[str, Any] = Field(default_factory=dict)
    acceptance: ByTexts[Rows]
    vocabulary: dict[Number, Rows] = Field(default_factory=dict)
    # Keys are values of alpha_c
    mask: dict[Annotated[str, Field(pattern=r"^(0|1|0\.[0-9]{1,6})$")], Rows] = Field(
        default_factory=dict
    )


class DynaMoConfig(HeadsConfig):
    """DynaMo token heads 2..n, one decoder layer each, and the co-occurrence counts of
    their mask.
    """

    kind: ClassVar[str] = "dynamo"
    architecture: ClassVar[str] = "DynaMoHeads"
    method: ClassVar[str] = "dynamo"
    options: ClassVar[type[TrainingOptions]] = DynaMoOptions
    parts: ClassVar[type[Parts]] = DynaMoParts
    tensor_names: ClassVar[str] = r"head\.\d+\.|cooccurrence\."
    counts: ClassVar[tuple[str, ...]] = ("cooccurrence.",)

    tokens: int = Field(
        ge=2, le=4, description="n: tokens of the joint; head 1 is the target"
    )
    layer_tensors: LayerTensors = Field(
        description=(
            "tensors of a token head, with the names in the target's decoder layer"
        )
    )
    # JSON's keys are strings.
    cooccurrence_entries: dict[
        Annotated[int, Field(strict=False)], Annotated[int, Field(ge=0)]
    ] = Field(default_factory=dict, description="number of counted n-grams, by order")
    sampling: JointSettings = Field(
        default_factory=lambda: JointSettings.model_validate({}),
        description="settings of the joint",
    )

    @model_validator(mode="after")
    def _sound_tensors(self) -> DynaMoConfig:
        size = self.target.hidden_size
        orders = set(range(2, self.tokens + 1))
        if self.num_speculative_tokens > self.tokens - 1:
            raise ValueError(
                f"{self.num_speculative_tokens} drafts need "
                f"{self.num_speculative_tokens} token heads"
            )
        if not any(size in shape for shape in self.layer_tensors.values()):
            raise ValueError(
                f"layer_tensors has no tensor of hidden size {size}, but every "
                "decoder layer has one"
            )
        if self.cooccurrence_entries and set(self.cooccurrence_entries) != orders:
            raise ValueError(
                "cooccurrence_entries must have n-grams of orders 2 to "
                f"{self.tokens}, or be empty"
            )
        return self

    @property
    def recommended(self) -> dict[str, Any]:
        return {**super().recommended, "eps_b": self.sampling.eps_b}

    def describe(self) -> str:
        masks = (
            f"masks of order {', '.join(map(str, self.cooccurrence_entries))}"
            if self.cooccurrence_entries
            else ""
        )
        return f"T{self.tokens}, {masks or 'no masks'}"

    @property
    def max_drafts(self) -> int:
        return self.tokens - 1

    @property
    def counts_tensor(self) -> str | None:
        return "cooccurrence.unigram" if self.cooccurrence_entries else None

    @property
    def layer_shapes(self) -> Shapes:
        return self.layer_tensors

    def check_counts(self, tensors: dict[str, np.ndarray]) -> None:
        from vllm_ppd.heads.dynamo.counts import check_counts

        if self.cooccurrence_entries:
            check_counts(tensors)

    def shapes(self) -> Shapes:
        shapes = {
            f"head.{token}.{name}": shape
            for token in range(2, self.tokens + 1)
            for name, shape in self.layer_tensors.items()
        }
        if self.cooccurrence_entries:
            shapes |= {
                "cooccurrence.unigram": [self.target.vocab_size],
                "cooccurrence.totals": [self.tokens],
            }
            for order, entries in self.cooccurrence_entries.items():
                shapes |= {
                    f"cooccurrence.{order}.keys": [entries],
                    f"cooccurrence.{order}.counts": [entries],
                }
        return shapes

    def work(
        self, drafts: int, vocabulary: float = 1.0, exit_layer: int | None = None
    ) -> Work:
        """One layer per draft, which runs over every token, and one read of the LM head for all."""
        return Work(layers=drafts, reads=vocabulary, rows=drafts)

    def settings(self, parts: DynaMoParts, greedy: bool) -> Iterator[Setting]:
        """A server takes the mask's power from the heads, so settings with another
        power have no options for it.
        """
        measured: list[tuple[int | None, Rows]] = [
            (None, on_texts(parts.acceptance, greedy))
        ]
        measured += (
            []
            if greedy
            else [
                *parts.vocabulary.items(),
                *((None, rows) for rows in parts.mask.values()),
            ]
        )
        for size, by in measured:
            for row in by.rows:
                n = row.drafts_allowed
                cycles = max(row.cycles, 1)
                alpha = row.alpha_c
                alpha = self.sampling.alpha_c if alpha is None else alpha
                sampling = self.sampling.model_dump() | {
                    "eps_b": row.eps_b,
                    "alpha_c": alpha,
                }
                served = {"num_speculative_tokens": n, "eps_b": row.eps_b}
                served |= {} if size is None else {"draft_vocab_size": size}
                work = self.work(
                    n, 1.0 if size is None else size / self.target.vocab_size
                )
                yield Setting(
                    {
                        "num_speculative_tokens": n,
                        "draft_vocab_size": size,
                        "sampling": sampling,
                    },
                    n,
                    row.drafted / cycles,
                    1 + row.accepted / cycles,
                    work.layers,
                    work.reads,
                    work.rows,
                    served=served if alpha == self.sampling.alpha_c else None,
                )
