# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a heads folder, in speculators' layout: what the heads are and for
which target they were made.

Each kind of heads derives a class from HeadsConfig, which registers it by its kind; a
kind's own fields stand beside speculators' keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, model_validator

from vllm_ppd.heads.options import TrainingOptions
from vllm_ppd.heads.planning import Parts, Setting

KINDS: dict[
    str, type[HeadsConfig]
] = {}  # the kinds imported so far; kinds.py imports all of them

Shapes = dict[str, list[int]]
MOST_DRAFTS = 16  # per step
MIN_DRAFT_VOCAB = 16  # tokens
LARGEST_BATCH = 2**31 - 1  # stands for no limit
# Holds the counts of heads whose published weights are not changed
COUNTS_NAME = "token_counts.safetensors"
# Begin the names of tensors that hold counts or n-grams
COUNTS = ("token_counts", "cooccurrence.")

Drafts = Annotated[int, Field(ge=1, le=MOST_DRAFTS)]


class TargetFingerprint(BaseModel):
    """Hashes of a target in hexadecimal, by which another one is told from it
    (target.py); fields of earlier versions are ignored."""

    vocabulary: str | None = None  # of the token-to-ID map (None: not recorded)
    lm_head: str | None = None  # of sampled rows (None: not recorded)


class TargetLayers(BaseModel):
    """Sizes of the target that heads depend on; speculators calls it `transformer_layer_config`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model_type: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=2)


class HeadsConfig(BaseModel, ABC):
    """Configuration that all kinds share. A kind adds its fields, its tensors and the
    cost of drafting with it.
    """

    # Strict: neither true nor 2.0 is a number of layers.
    model_config = ConfigDict(
        populate_by_name=True, protected_namespaces=(), strict=True
    )
    # Also the name of the drafting method that reads these heads
    kind: ClassVar[str]
    architecture: ClassVar[str]
    options: ClassVar[type[TrainingOptions]]  # of `ppd train KIND`
    parts: ClassVar[type[Parts]]  # what `ppd calibrate` stores
    # A regular expression for tensor names that only these heads have
    tensor_names: ClassVar[str]

    verifier: str = Field(
        validation_alias=AliasPath(
            "speculators_config", "verifier", "name_or_path"
        ),
        min_length=1,
        max_length=4096,
        description="name or path of the target",
    )
    verifier_architectures: list[str] = Field(
        default_factory=list,
        validation_alias=AliasPath(
            "speculators_config", "verifier", "architectures"
        ),
        description="names of the target's classes, as in its config.json",
    )
    num_speculative_tokens: Drafts = Field(
        validation_alias=AliasPath(
            "speculators_config", "proposal_methods", 0, "speculative_tokens"
        ),
        description="drafts per step recommended for these heads",
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=MIN_DRAFT_VOCAB,
        description="size of the default draft vocabulary: the most frequent tokens "
        "(None: all)",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    target: TargetLayers = Field(validation_alias="transformer_layer_config")
    fingerprint: TargetFingerprint = TargetFingerprint()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if hasattr(cls, "kind"):  # not one that kinds derive from
            KINDS[cls.kind] = cls

    @model_validator(mode="after")
    def _bounded(self) -> HeadsConfig:
        if self.draft_vocab_size is None:
            return self
        if self.counts_tensor is None:
            raise ValueError(
                "draft_vocab_size needs token counts, which these heads do not have"
            )
        if self.draft_vocab_size > self.target.vocab_size:
            raise ValueError(
                f"draft_vocab_size is more than the vocabulary of "
                f"{self.target.vocab_size}"
            )
        return self

    @abstractmethod
    def shapes(self) -> Shapes:
        """The tensors of `model.safetensors`: shape by name."""

    @abstractmethod
    def describe(self) -> str:
        """A description of the heads in a few words."""

    @abstractmethod
    def settings(self, parts: Any) -> Iterator[Setting]:
        """Every setting of trained heads in the kind's parts, on sampled texts."""

    @property
    def recommended(self) -> dict[str, Any]:
        """Options of the server, by name, that these heads recommend a value for."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_vocab_size": self.draft_vocab_size,
        }

    @property
    def max_drafts(self) -> int | None:
        """The most drafts per step that these heads can make (None: any number)."""
        return None

    @property
    def counts_tensor(self) -> str | None:
        """The name of the tensor with token counts, from which draft vocabularies are
        made (None: there is none).
        """
        return None

    @property
    def names_target(self) -> bool:
        """Whether these heads describe their target completely; heads of other projects
        may not name it.
        """
        return self.target.num_hidden_layers > 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Allowed types of the floating-point tensors."""
        return (self.dtype,)

    @classmethod
    def is_named_in(cls, data: dict[str, Any]) -> bool:
        """Whether a config.json describes heads of this kind."""
        return data.get("speculators_model_type") == cls.kind

    def stored_names(self, tensor: str) -> Iterator[str]:
        """Names that a tensor of `shapes` may have in the file; the first one present is read."""
        yield tensor

    @staticmethod
    def is_count(tensor: str) -> bool:
        """Whether a tensor of that name holds counts or n-grams, which are integers."""
        return tensor.startswith(COUNTS)

    def to_json(self) -> dict[str, Any]:
        """The dictionary in speculators' layout, which only this package reads, and
        from which model_validate makes the same configuration.
        """
        elsewhere = {
            "verifier",
            "verifier_architectures",
            "num_speculative_tokens",
            "target",
        }
        fields = self.model_dump(mode="json", exclude=elsewhere)
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.kind,
            "speculators_config": {
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.num_speculative_tokens,
                    },
                ],
                "verifier": {
                    "name_or_path": self.verifier,
                    "architectures": self.verifier_architectures,
                },
            },
            "transformer_layer_config": self.target.model_dump(),
            "transformers_version": metadata.version("transformers"),
            "vllm_ppd_version": metadata.version("vllm-ppd"),
            **fields,
        }


class CountedHeads(HeadsConfig):
    """Heads that draft from a part of the vocabulary if they have token counts."""

    token_counts: bool = Field(
        False,
        description="the heads have token counts of a text, for a draft vocabulary",
    )

    @property
    def counts_tensor(self) -> str | None:
        return "token_counts" if self.token_counts else None

    def counts_shape(self) -> Shapes:
        """The shape of the counts by their name; empty if there are none."""
        if not self.token_counts:
            return {}
        return {"token_counts": [self.target.vocab_size]}
