# SPDX-License-Identifier: Apache-2.0
"""Token heads: `config.json`, the options of their training, what calibration stores,
and what drafting costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.options import FullOptions
from vllm_ppd.heads.planning import (
    Counts,
    PartsByVocabulary,
    Setting,
    Share,
    Stored,
)

MASK = "mask."  # begins the names of the learned mask's tensors


class JointSettings(BaseModel):
    """Settings of the joint; defaults are the paper's (appendix A.1) where it names one.
    Fields of earlier versions are ignored.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    # The joint of 4 tokens has k^3 entries per request: 2 million at 128.
    k: int = Field(50, ge=1, le=128, description="top-k of each head")
    eps_b: float = Field(
        0.5,
        ge=0,
        le=1,
        description="back-off threshold: n tokens are taken if an n-gram is above "
        "eps_b^(n-1) in the joint divided by its sum over the top-k (the paper does "
        "not divide it); 0 always takes n tokens, 1 always takes one",
    )


class DynaMoOptions(FullOptions):
    """`ppd train dynamo`: token heads of one decoder layer each, and co-occurrence
    counts of the same data.
    """

    kind = "dynamo"

    warmup: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="share of the steps with a rising learning rate (A.1: 1 %)",
    )
    num_speculative_tokens: int = Field(
        2,
        ge=1,
        le=3,
        description="number of draft layers to train: n - 1 of DynaMo-Tn",
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
    mask_rank: int = Field(
        64,
        ge=0,
        description="rank of a learned mask, by which heads read the newest token and "
        "the draft before; 0: none (the paper)",
    )

    @model_validator(mode="after")
    def _possible(self) -> DynaMoOptions:
        if self.train_vocab_size and not self.mask_entries:
            raise ValueError(
                "--train-vocab-size needs the counts of the mask; omit --mask-entries 0"
            )
        if self.states_from == "vllm":
            raise ValueError(
                "heads begin beside the target's last layer, which a training with "
                "--states-from vllm does not have; omit it"
            )
        return self

    @property
    def tokens(self) -> int:
        """n of DynaMo-Tn: tokens of the joint, head 1 included."""
        return self.num_speculative_tokens + 1


class Row(Counts):
    """Counts of a back-off threshold and a number of drafts."""

    eps_b: Share
    drafts_allowed: int = Field(ge=1, le=16)


class Rows(Stored):
    """Counts by back-off threshold and drafts."""

    rows: list[Row] = Field(min_length=1, max_length=4096)


DynaMoParts = PartsByVocabulary[Rows]


class DynaMoConfig(HeadsConfig):
    """DynaMo token heads 2..n, one decoder layer each, and the co-occurrence counts of
    their mask.
    """

    kind = "dynamo"
    architecture = "DynaMoHeads"
    options = DynaMoOptions
    parts = DynaMoParts
    tensor_names = r"head\.\d+\.|cooccurrence\."

    tokens: int = Field(
        ge=2, le=4, description="n: tokens of the joint; head 1 is the target"
    )
    layer_tensors: Shapes = Field(
        min_length=1,
        description=(
            "tensors of a token head, with the names in the target's decoder layer"
        ),
    )
    # JSON's keys are strings.
    cooccurrence_entries: dict[
        Annotated[int, Field(strict=False)], Annotated[int, Field(ge=0)]
    ] = Field(
        default_factory=dict, description="number of counted n-grams, by order"
    )
    mask_rank: int = Field(
        0, ge=0, description="rank of the learned mask (0: none)"
    )
    sampling: JointSettings = Field(
        JointSettings.model_validate({}), description="settings of the joint"
    )

    @model_validator(mode="after")
    def _sound_tensors(self) -> DynaMoConfig:
        orders = set(range(2, self.tokens + 1))
        if self.num_speculative_tokens > self.tokens - 1:
            raise ValueError(
                f"{self.num_speculative_tokens} drafts need "
                f"{self.num_speculative_tokens} token heads"
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
        orders = ", ".join(map(str, self.cooccurrence_entries))
        masks = f"masks of order {orders}" if orders else "no masks"
        return f"T{self.tokens}, {masks}"

    @property
    def max_drafts(self) -> int:
        return self.tokens - 1

    @property
    def counts_tensor(self) -> str | None:
        return "cooccurrence.unigram" if self.cooccurrence_entries else None

    def shapes(self) -> Shapes:
        shapes = {
            f"head.{token}.{name}": shape
            for token in range(2, self.tokens + 1)
            for name, shape in self.layer_tensors.items()
        }
        if self.mask_rank:
            size = self.target.hidden_size
            # U_i of heads 2..n; B_i and A_i of heads 3..n (mask.py)
            shapes[f"{MASK}newest"] = [self.tokens - 1, size, size]
            if self.tokens > 2:
                thin = [self.tokens - 2, self.mask_rank, size]
                shapes[f"{MASK}before"] = thin
                shapes[f"{MASK}after"] = thin
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

    def settings(self, parts: DynaMoParts) -> Iterator[Setting]:
        """One layer per draft, which runs over every token, a matrix of the learned
        mask, and one read of the LM head for all.
        """
        matrix = parts.timing.transform_in_layers if self.mask_rank else 0.0
        for size, by in parts.by_vocabulary():
            reads = 1.0 if size is None else size / self.target.vocab_size
            for row in by.rows:
                sampling = self.sampling.model_dump() | {"eps_b": row.eps_b}
                options = {
                    "num_speculative_tokens": row.drafts_allowed,
                    "draft_vocab_size": size,
                    "sampling": sampling,
                }
                length = 1 + row.accepted / max(row.cycles, 1)
                layers = row.drafts_allowed * (1 + matrix)
                yield Setting(options, length, layers, reads)
