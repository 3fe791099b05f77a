# SPDX-License-Identifier: Apache-2.0
"""CP heads: `config.json`, the options of their training, what calibration stores, and
what drafting costs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field, model_validator

from vllm_ppd.heads.base import MOST_DRAFTS, CountedHeads, Shapes
from vllm_ppd.heads.options import FullOptions
from vllm_ppd.heads.planning import ByDrafts, PartsByVocabulary, Setting
from vllm_ppd.heads.text import Integers

CPParts = PartsByVocabulary[ByDrafts]
Condition = Literal["none", "recurrent"]
Rank = Annotated[int, Field(ge=1, le=64, description="experts of the mixture")]


class Experts(BaseModel):
    """The shape of a CP head, which its configuration and the options of its training share."""

    rank: Rank = 3
    factorized: bool = Field(
        True,
        validation_alias=AliasChoices("factorized", "factorised"),
        description="W = E* T; otherwise full V x E matrices, as measured in the paper",
    )
    condition: Condition = Field(
        "recurrent",
        description="what heads read besides the state: nothing (the paper), or each "
        "token through a recurrent state",
    )
    inner_size: int | None = Field(
        None,
        ge=1,
        description="width of a recurrent state's gated layer (default: twice the "
        "model's)",
    )
    layers: Annotated[Integers, Field(strict=False, max_length=64)] = Field(
        (),
        description="layers after which a recurrent state also reads the target's "
        "states, such as 8,16,24",
    )
    expert_rank: int = Field(
        32,
        ge=1,
        description="rank of the matrices by which recurrent experts differ",
    )
    num_speculative_tokens: int

    @model_validator(mode="after")
    def _possible(self) -> Experts:
        if self.layers and self.condition != "recurrent":
            raise ValueError(
                f"layers={self.layers} need condition 'recurrent', not 'none'"
            )
        if list(self.layers) != sorted(
            {layer for layer in self.layers if layer > 0}
        ):
            raise ValueError(
                f"layers={self.layers} must be ascending and at least 1"
            )
        if self.condition == "recurrent" and not self.factorized:
            raise ValueError(
                "condition 'recurrent' needs factorized heads; use 'none'"
            )
        return self


class ChainOptions(FullOptions):
    """Options of heads that are distilled at each position: CP and recurrent heads."""

    decay: float = Field(
        0.8,
        gt=0,
        le=1,
        description="weight of a draft's distillation, relative to that of the "
        "previous draft",
    )
    train_vocab_size: int | None = Field(
        None,
        ge=0,
        description="train over the most frequent tokens of the answers only, and "
        "draft from them (default: so many that they cover 99 % of the answers; 0: all)",
    )


class CPOptions(ChainOptions, Experts):
    """`ppd train cp`: a CP head of rank r, with a frozen target ("head-only" in the
    paper) or one trained with it.
    """

    kind = "cp"

    balance: float = Field(
        0.1, ge=0, description="weight of the load-balancing loss (eq. 10)"
    )
    start: Literal["ridge", "identity"] = Field(
        "ridge",
        description="initial transforms: a ridge regression of the target's later "
        "states, or the identity",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout rate of a recurrent state's gated layer",
    )
    base_learning_rate: float = Field(
        1e-4,
        ge=0,
        description="peak learning rate of the base model (full recipe)",
    )
    base_start: Literal["trained", "random"] = Field(
        "trained",
        description="initial weights of the base model (full recipe); random is the "
        "paper's choice",
    )

    @property
    def positions(self) -> int:
        """Positions of the joint: one verified token and the drafts."""
        return self.num_speculative_tokens + 1

    @model_validator(mode="after")
    def _fits(self) -> CPOptions:
        if not self.factorized and self.train_vocab_size:
            raise ValueError(
                "full classifiers are trained over the whole vocabulary; omit "
                "--train-vocab-size"
            )
        if self.base_start == "random" and (self.recipe, self.start) != (
            "full",
            "identity",
        ):
            raise ValueError(
                "a random base model must be trained with the heads; add --recipe "
                "full --start identity"
            )
        return self


class ChainConfig(CountedHeads):
    """Heads that draft token by token: CP and recurrent heads."""

    parts = CPParts

    @abstractmethod
    def work(self, drafts: int) -> tuple[float, float]:
        """What a number of drafts reads per step: d x d matrices of the heads, and the
        whole LM head so many times.
        """

    def settings(self, parts: CPParts) -> Iterator[Setting]:
        """Settings for each number of drafts and draft vocabulary."""
        for size, by in parts.by_vocabulary():
            share = 1.0 if size is None else size / self.target.vocab_size
            for drafts, counts in enumerate(by.by_drafts, start=1):
                matrices, reads = self.work(drafts)
                layers = matrices * parts.timing.transform_in_layers
                options = {
                    "num_speculative_tokens": drafts,
                    "draft_vocab_size": size,
                }
                yield Setting(options, counts.length, layers, reads * share)


class CPConfig(ChainConfig, Experts):
    """A CP head of rank r over n positions."""

    kind = "cp"
    architecture = "CPHead"
    options = CPOptions
    tensor_names = r"cp\.(gate|transforms|classifiers)$"

    positions: int = Field(
        ge=2,
        le=17,
        description="positions of the joint: one verified token and n-1 drafts",
    )
    rank: Rank
    condition: Condition = Field(
        "none", description="what the experts read besides the state"
    )

    @model_validator(mode="after")
    def _within_the_target(self) -> CPConfig:
        drafts = self.num_speculative_tokens
        if drafts > self.positions - 1:
            raise ValueError(
                f"num_speculative_tokens={drafts} needs {drafts + 1} positions, not "
                f"{self.positions}"
            )
        if self.layers and self.layers[-1] >= self.target.num_hidden_layers:
            raise ValueError(
                f"layers names layer {self.layers[-1]}, but the target has "
                f"{self.target.num_hidden_layers}"
            )
        return self

    def describe(self) -> str:
        shape = f"rank {self.rank} over {self.positions} positions"
        if self.condition == "none":
            return f"{shape}, {'factorized' if self.factorized else 'full'}"
        layers = ", ".join(str(layer) for layer in self.layers)
        reads = f" on layers {layers} and the last" if layers else ""
        return f"{shape}, condition recurrent{reads}, {self.inner} inner"

    @property
    def factors(self) -> int:
        """Positions that the experts predict: all, or those after the newest token if
        the head reads it.
        """
        return self.positions if self.condition == "none" else self.positions - 1

    @property
    def inner(self) -> int:
        """The width of a recurrent state's gated layer."""
        return self.inner_size or 2 * self.target.hidden_size

    @property
    def max_drafts(self) -> int:
        """A recurrent state may make more drafts than it was trained for."""
        return (
            MOST_DRAFTS if self.condition == "recurrent" else self.positions - 1
        )

    def shapes(self) -> Shapes:
        size = self.target.hidden_size
        rank = self.rank
        shapes: Shapes = {"cp.gate": [rank, size]}
        if self.condition == "recurrent":
            read = [size + 2 * self.inner, size]
            shapes["cp.token_gate"] = [rank, size]
            shapes["cp.recurrence.token"] = read
            shapes["cp.recurrence.inner"] = read
            shapes["cp.recurrence.outer"] = [size, self.inner]
            if rank > 1:
                shapes["cp.recurrence.down"] = [rank, self.expert_rank, size]
                shapes["cp.recurrence.up"] = [rank, size, self.expert_rank]
            if self.layers:
                fused = (1 + len(self.layers)) * size
                shapes["cp.recurrence.fuse"] = [size, fused]
        else:
            rows = size if self.factorized else self.target.vocab_size
            name = "transforms" if self.factorized else "classifiers"
            shapes[f"cp.{name}"] = [self.factors, rank, rows, size]
        return shapes | self.counts_shape()

    def work(self, drafts: int) -> tuple[float, float]:
        """A recurrent state reads its matrices and the LM head for each draft, as each
        needs the draft before.

        A transform is read for each expert and position, and the LM head once for all
        of them. A whole classifier is an LM head.
        """
        if self.condition == "recurrent":
            size = self.target.hidden_size
            matrices = 2 + 5 * self.inner / size
            if self.rank > 1:
                matrices += 2 * self.rank * self.expert_rank / size
            fuse = 1 + len(self.layers) if self.layers else 0  # once per step
            return fuse + drafts * matrices, drafts
        states = self.rank * (drafts + 1)
        return (states, 1) if self.factorized else (0, states)
