# SPDX-License-Identifier: Apache-2.0
"""CP heads: `config.json`, the options of their training, and what drafting with them costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.calibration.setting import Setting, Work, by_vocabulary
from vllm_ppd.heads.training.options import DistillationOptions, TrainingOptions


class CPOptions(DistillationOptions):
    """`ppd train cp`: a CP head of rank r, the target frozen ("head-only" in the paper) or trained along."""

    kind: ClassVar[str] = "cp"

    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="Muon for transforms and AdamW for the others, or AdamW alone (the paper names none)"
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="peak learning rate (the paper names none); larger for what reads embeddings"
    )
    rank: int = Field(3, ge=1, le=64, description="experts of the mixture")
    positions: int = Field(4, ge=2, le=17, description="positions of the joint: one verified token and n-1 drafts")
    condition: Literal["none", "token", "chain"] = Field(
        "token",
        description="what is read beside the state: nothing (the paper), the newest token, each draft before too",
    )
    factorised: bool = Field(True, description="W = E* T; otherwise whole V x E matrices, as the paper measured")
    balance: float = Field(0.1, ge=0, description="weight of the load-balancing loss (eq. 10)")
    start: Literal["ridge", "identity"] = Field(
        "ridge", description="first transforms: a ridge regression of the target's later states, or its own LM head"
    )
    recipe: Literal["heads", "full"] = Field(
        "heads", description="train the head alone, or the base model with it (section 3.1; writes OUT/base)"
    )
    base_learning_rate: float = Field(1e-4, ge=0, description="peak rate of the base model, full recipe")
    base_start: Literal["trained", "random"] = Field(
        "trained", description="weights of the base model, full recipe: as given, or random (the paper: from scratch)"
    )
    train_vocab_size: int = Field(
        0,
        ge=0,
        description="train over the most frequent tokens of the data, and draft from them (0: the whole vocabulary)",
    )
    position_share: float = Field(1.0, gt=0, le=1, description="share of a window's positions that a step trains on")

    @model_validator(mode="after")
    def _fits(self) -> CPOptions:
        if not self.factorised and self.condition != "none":
            raise ValueError("whole classifiers have no condition; add --condition none to --no-factorised")
        if not self.factorised and self.train_vocab_size:
            raise ValueError("whole classifiers are trained over the whole vocabulary; omit --train-vocab-size")
        if self.recipe == "full" and self.train_vocab_size:
            raise ValueError("the full recipe trains the whole LM head; omit --train-vocab-size")
        if self.base_start == "random" and (self.recipe, self.start) != ("full", "identity"):
            raise ValueError("a random base model is trained along; add --recipe full --start identity")
        if self.condition == "chain" and self.positions < 3:
            raise ValueError("condition chain reads the draft before: it needs 3 positions; use --condition token")
        return self


class CPConfig(HeadsConfig):
    """A CP head of rank r over n positions."""

    kind: ClassVar[str] = "cp"
    architecture: ClassVar[str] = "CPHead"
    method: ClassVar[str] = "cp"
    options: ClassVar[type[TrainingOptions]] = CPOptions
    tensor_names: ClassVar[str] = r"cp\.(gate|transforms|classifiers)$"
    counts: ClassVar[tuple[str, ...]] = ("token_counts",)

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

    def work(self, drafts: int, vocabulary: float = 1.0, exit_layer: int | None = None) -> Work:
        """One read of the LM head, which all states share; chain reads it a draft, as each needs the draft before.

        A transform is read for each expert and position. A condition saves the first position's, and adds a matrix a
        draft, which all experts share; chain one more a draft but the first. Whole classifiers are an LM head each.
        """
        lead, chain = self.positions - self.factors, self.condition == "chain"
        states = self.rank * (drafts + 1 - lead)
        if not self.factorised:
            return Work(0, 0, states * vocabulary)
        matrices = states + drafts * lead + (drafts - 1) * chain
        return Work(0, matrices, *((drafts * vocabulary, self.rank) if chain else (vocabulary, states)))

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

    def settings(self, parts: dict[str, Any], greedy: bool) -> Iterator[Setting]:
        """Every number of drafts over every draft vocabulary that was measured."""
        transform = parts["timing"].get("transform_in_layers", 0.0)
        for size, share, found in by_vocabulary(parts, self.target.vocab_size, greedy):
            for n, counts in enumerate(found["by_drafts"], start=1):
                options = {"num_speculative_tokens": n, "draft_vocab_size": size}
                drafted, work = counts["drafted"] / max(counts["cycles"], 1), self.work(n, share)
                layers = work.matrices * transform
                yield Setting(options, n, drafted, counts["length"], layers, work.reads, rows=work.rows)
