# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a heads folder, in speculators' layout: what the heads are and for which target they were made.

Each kind of heads is one class here; its own fields stand beside speculators' keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ppd.heads.dynamo.joint_settings import JointSettings
from vllm_ppd.heads.fingerprint import TargetFingerprint
from vllm_ppd.heads.layout import Drafts, Layout, TargetLayers, TargetName
from vllm_ppd.heads.quote import quoted

Shapes = dict[str, list[int]]
MOST_NUMBERS = 1 << 35  # of all tensors together: whole classifiers of a large vocabulary are some 2^33
LAYER_TENSOR = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"  # as modules and parameters are named

LayerTensors = Annotated[
    dict[
        Annotated[str, Field(pattern=LAYER_TENSOR, max_length=200)],
        Annotated[list[Annotated[int, Field(ge=1, le=1 << 30)]], Field(min_length=1, max_length=4)],
    ],
    Field(min_length=1, max_length=4096),
]


def is_count(tensor: str) -> bool:
    """Whether a tensor of that name holds counts or n-grams, which are integers."""
    return tensor.startswith(("cooccurrence.", "token_counts"))


class HeadsConfig(BaseModel, ABC):
    """What all kinds share. A kind adds its fields and says which tensors it expects."""

    # Strict: a truth value is no number of layers, and 2.0 is none either.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)
    kind: ClassVar[str]
    architecture: ClassVar[str]

    verifier: TargetName
    num_speculative_tokens: Drafts = Field(3, description="drafts a step recommended for these heads")
    draft_vocab_size: int | None = Field(
        None, ge=16, description="how many tokens, the most frequent ones, are drafted by default (None: all)"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    target: TargetLayers
    fingerprint: TargetFingerprint = TargetFingerprint()

    @model_validator(mode="after")
    def _known_frequencies(self) -> HeadsConfig:
        if self.draft_vocab_size is not None:
            if self.counts_tensor is None:
                raise ValueError("draft_vocab_size needs token counts, which these heads lack")
            if self.draft_vocab_size > self.target.vocab_size:
                raise ValueError(f"draft_vocab_size is more than the vocabulary of {self.target.vocab_size}")
        return self

    @model_validator(mode="after")
    def _bounded(self) -> HeadsConfig:
        numbers = sum(map(math.prod, self.shapes().values()))
        if numbers > MOST_NUMBERS:
            raise ValueError(f"these heads would have {numbers:.1e} numbers, more than the {MOST_NUMBERS:,} allowed")
        return self

    @abstractmethod
    def shapes(self) -> Shapes:
        """The tensors of `model.safetensors`: shape by name."""

    @abstractmethod
    def describe(self) -> str:
        """What they are, in a few words."""

    @property
    def max_drafts(self) -> int | None:
        """Drafts a step that they can make at most (None: any number)."""
        return None

    @property
    def counts_tensor(self) -> str | None:
        """The tensor of how often tokens occur, which a draft vocabulary is made of (None: they do not know)."""
        return None

    def to_json(self) -> dict[str, Any]:
        """The dictionary in speculators' layout."""
        own = self.model_dump(mode="json", exclude=set(HeadsConfig.model_fields))
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.kind,
            "speculators_config": {
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.num_speculative_tokens},
                ],
                "verifier": {"name_or_path": self.verifier, "architectures": []},
            },
            "transformer_layer_config": self.target.model_dump(),
            **own,
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": self.dtype,
            "fingerprint": self.fingerprint.model_dump(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> HeadsConfig:
        """The configuration of the kind that the dictionary names.

        Raises:
            KeyError: if there is no such kind.
            ValidationError: if a field is missing, of another type or out of bounds.
        """
        cls = KINDS[data["speculators_model_type"]]
        layout = Layout.model_validate(data)
        own = {name: data[name] for name in cls.model_fields if name not in HeadsConfig.model_fields and name in data}
        return cls.model_validate(
            {
                "verifier": layout.speculators_config.verifier.name_or_path,
                "num_speculative_tokens": layout.speculators_config.proposal_methods[0].speculative_tokens,
                "draft_vocab_size": layout.draft_vocab_size,
                "dtype": layout.dtype,
                "target": layout.transformer_layer_config,
                "fingerprint": layout.fingerprint or TargetFingerprint(),
                **own,
            }
        )


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


KINDS: dict[str, type[HeadsConfig]] = {config.kind: config for config in (EarlyConfig, CPConfig, DynaMoConfig)}
