# SPDX-License-Identifier: Apache-2.0
"""speculators' layout of a `config.json`: the keys that every kind of heads has there."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_DRAFTS = 16  # a step
LARGEST_BATCH = 2**31 - 1  # stands for no limit

TargetName = Annotated[str, Field(min_length=1, max_length=4096, description="name or path of the target")]
Drafts = Annotated[int, Field(ge=1, le=MOST_DRAFTS)]


class TargetFingerprint(BaseModel):
    """Hashes in hexadecimal; None where the target is not at hand."""

    tokenizer: str | None = None  # of the file
    vocabulary: str | None = None  # which token has which ID (None: not recorded, as in older heads)
    lm_head: str | None = None
    lm_head_bfloat16: str | None = None  # of the values rounded to bfloat16 (None: not recorded, as in older heads)
    # Of a target at hand, not recorded with heads: what lm_head would be for a copy of the same values in another
    # dtype, and for one that rounds them.
    same_values: frozenset[str] = Field(default=frozenset(), exclude=True)
    rounded: frozenset[str] = Field(default=frozenset(), exclude=True)

    def difference(self, target: TargetFingerprint) -> str | None:
        """What tells the target of heads with this fingerprint from another; None if nothing does.

        Fingerprints are compared where both sides have one (a target that is not on this disk yet has none).
        """
        if self.vocabulary and target.vocabulary:
            # The same tokenizer is another file when another version of transformers writes it.
            if self.vocabulary != target.vocabulary:
                return "the hash of its vocabulary differs"
        elif self.tokenizer and target.tokenizer and self.tokenizer != target.tokenizer:
            return "the hash of its tokenizer differs"
        if not self.lm_head or not target.lm_head or self.lm_head in {target.lm_head, *target.same_values}:
            return None
        both = self.lm_head_bfloat16 is not None and self.lm_head_bfloat16 == target.lm_head_bfloat16
        if both or self.lm_head in target.rounded:
            return "the dtype of its lm_head differs (the values are equal once they are rounded to the narrower one)"
        return "the hash of its lm_head differs"


class TargetLayers(BaseModel):
    """What the heads need to know of the target; speculators calls it `transformer_layer_config`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model_type: str
    hidden_size: int = Field(ge=1, le=1 << 20)
    vocab_size: int = Field(ge=1, le=1 << 26)
    num_hidden_layers: int = Field(ge=2, le=4096)


class Proposal(BaseModel):
    """One way of drafting that the heads recommend."""

    model_config = ConfigDict(strict=True)
    speculative_tokens: Drafts


class Verifier(BaseModel):
    """The target."""

    model_config = ConfigDict(strict=True)
    name_or_path: TargetName


class Speculators(BaseModel):
    """`speculators_config`."""

    model_config = ConfigDict(strict=True)
    proposal_methods: list[Proposal] = Field(min_length=1, max_length=16)
    verifier: Verifier


class Calibrated(BaseModel):
    """What `ppd calibrate` found on one device, and holds there alone."""

    model_config = ConfigDict(extra="forbid", strict=True)
    device: str = Field(min_length=1, max_length=200, description="name of the device that was measured")
    num_speculative_tokens_per_batch_size: list[
        Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_BATCH)]], Field(min_length=3, max_length=3)]
    ] = Field(min_length=1, max_length=1024, description="[first batch size, last one, drafts], as vLLM takes it")

    @model_validator(mode="after")
    def _in_order(self) -> Calibrated:
        expected = 1
        for first, last, drafts in self.num_speculative_tokens_per_batch_size:
            if first != expected or last < first or drafts > MOST_DRAFTS:
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size must have ranges from 1 on without gaps, and at most "
                    f"{MOST_DRAFTS} drafts"
                )
            expected = last + 1
        return self


class Layout(BaseModel):
    """The keys of all kinds; those of a kind stand beside them."""

    model_config = ConfigDict(strict=True)
    speculators_config: Speculators
    transformer_layer_config: TargetLayers
    draft_vocab_size: int | None = None
    dtype: str = "float32"
    fingerprint: TargetFingerprint | None = None
    calibration: Calibrated | None = None
