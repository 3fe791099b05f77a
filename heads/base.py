# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a heads folder, in speculators' layout: what the heads are and for which target they were made.

Each kind of heads derives a class from HeadsConfig, which registers it by its kind; a kind's own fields stand beside
speculators' keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ppd.heads.layout import Calibrated, Drafts, Layout, TargetFingerprint, TargetLayers, TargetName
from vllm_ppd.heads.measured import Parts, Setting, Work
from vllm_ppd.heads.training.options import TrainingOptions

if TYPE_CHECKING:
    import numpy as np

KINDS: dict[str, type[HeadsConfig]] = {}  # of those that are imported; kinds.py imports all of them

Shapes = dict[str, list[int]]
MOST_NUMBERS = 1 << 35  # of all tensors together: whole classifiers of a large vocabulary are some 2^33


class HeadsConfig(BaseModel, ABC):
    """What all kinds share. A kind adds its fields, its tensors and what drafting with it costs."""

    # Strict: a truth value is no number of layers, and 2.0 is none either.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)
    kind: ClassVar[str]  # as speculators' algorithm name
    architecture: ClassVar[str]
    method: ClassVar[str]  # the drafting method that reads them, by the plugin's name for it
    options: ClassVar[type[TrainingOptions]]  # of `ppd train KIND`
    parts: ClassVar[type[Parts]]  # what `ppd calibrate` stores of them
    tensor_names: ClassVar[str]  # a regular expression: names by which the weights are told from those of other models
    counts: ClassVar[tuple[str, ...]] = ()  # beginnings of the names of tensors that hold counts or n-grams

    verifier: TargetName
    num_speculative_tokens: Drafts = Field(3, description="drafts a step recommended for these heads")
    draft_vocab_size: int | None = Field(
        None, ge=16, description="how many tokens, the most frequent ones, are drafted by default (None: all)"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    target: TargetLayers
    fingerprint: TargetFingerprint = TargetFingerprint()
    calibration: Calibrated | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        KINDS[cls.kind] = cls

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

    @abstractmethod
    def work(self, drafts: int, vocabulary: float = 1.0, exit_layer: int | None = None) -> Work:
        """What drafting reads.

        Args:
            drafts: of a step.
            vocabulary: share of it that is drafted.
            exit_layer: where drafts are read, by heads that have a choice (None: the exit that they recommend).
        """

    @abstractmethod
    def settings(self, parts: Any, greedy: bool) -> Iterator[Setting]:
        """Every setting in parts of the kind's own, on greedy texts or on sampled ones."""

    def match_rates(self, parts: Any) -> list[tuple[int, int, bool, float]] | None:
        """(Layer, k, whether by heads, share of tokens among the k best there), by which a worker group is planned.

        None for kinds that read no exit layers.
        """
        return None

    @property
    def recommended(self) -> dict[str, Any]:
        """Options of the server, by name, that these heads recommend a value for."""
        return {"num_speculative_tokens": self.num_speculative_tokens, "draft_vocab_size": self.draft_vocab_size}

    @property
    def max_drafts(self) -> int | None:
        """Drafts a step that they can make at most (None: any number)."""
        return None

    @property
    def counts_tensor(self) -> str | None:
        """The tensor of how often tokens occur, which a draft vocabulary is made of (None: they do not know)."""
        return None

    @classmethod
    def is_count(cls, tensor: str) -> bool:
        """Whether a tensor of that name holds counts or n-grams, which are integers."""
        return tensor.startswith(cls.counts)

    def check_counts(self, tensors: dict[str, np.ndarray]) -> None:
        """Refuse counts that no corpus has (nothing by default).

        Args:
            tensors: those that hold counts, none of them negative.

        Raises:
            ValueError: saying what is wrong with them.
        """

    @property
    def layer_shapes(self) -> Shapes | None:
        """Shapes by name of the target's decoder layer that the heads have layers like (None: they have none)."""
        return None

    def to_json(self) -> dict[str, Any]:
        """The dictionary in speculators' layout."""
        fields = self.model_dump(mode="json", exclude=set(HeadsConfig.model_fields))
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
            **fields,
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": self.dtype,
            "fingerprint": self.fingerprint.model_dump(),
            **({} if self.calibration is None else {"calibration": self.calibration.model_dump()}),
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
        fields = {
            name: data[name] for name in cls.model_fields if name not in HeadsConfig.model_fields and name in data
        }
        return cls.model_validate(
            {
                "verifier": layout.speculators_config.verifier.name_or_path,
                "num_speculative_tokens": layout.speculators_config.proposal_methods[0].speculative_tokens,
                "draft_vocab_size": layout.draft_vocab_size,
                "dtype": layout.dtype,
                "target": layout.transformer_layer_config,
                "fingerprint": layout.fingerprint or TargetFingerprint(),
                "calibration": layout.calibration,
                **fields,
            }
        )
