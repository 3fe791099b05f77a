# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd fit`, `ppd data`, `ppd train` and `ppd calibrate`, declared once: flags,
help and errors are made from them. This module imports nothing heavy.

Defaults of training are the paper's if it names one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from vllm_ppd.heads.planning import Share
from vllm_ppd.heads.text import COMMAS

TrustRemoteCode = Annotated[
    bool, Field(description="run code that comes with the model")
]
TensorParallel = Annotated[
    int, Field(ge=1, description="GPUs among which vLLM divides the model")
]


class Options(BaseModel):
    """Options of a command, which refuse unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=()
    )
    # Those that may change before a stopped run continues
    free: ClassVar[frozenset[str]] = frozenset()

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        return self.model_dump(mode="json", exclude=set(self.free))


class FitOptions(Options):
    """Write data, then train and calibrate heads, within a time limit. The same command resumes."""

    free = frozenset(
        {"out", "trust_remote_code", "license", "tensor_parallel_size"}
    )

    model: str = Field(
        description=(
            "target: a causal LM folder or Hub name that vLLM and transformers can load"
        )
    )
    out: str | None = Field(
        None,
        description=(
            "heads folder to write (default: the model's name with -ppd); OUT.fit keeps "
            "the data and a stopped run's progress"
        ),
    )
    minutes: float = Field(
        60.0,
        gt=0,
        description="time limit; half of it is for the data, and most of the rest "
        "for training",
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts like those to be served (default: 300 of the "
        "package, and the model's own)",
    )
    seed: int = Field(0, description="seed of the texts and of the training")
    tensor_parallel_size: TensorParallel = 1
    trust_remote_code: TrustRemoteCode = False
    license: str = Field(
        "other",
        pattern=r"^[a-z0-9.-]+$",
        max_length=64,
        description="license of the heads for their model card, as the Hub names it",
    )


class DataOptions(Options):
    """Let the target answer prompts, or write user turns and answer them."""

    free = frozenset(
        {
            "out",
            "number",
            "batch",
            "precision",
            "kv_cache_gib",
            "tensor_parallel_size",
            "trust_remote_code",
        }
    )

    model: str = Field(
        description="target: a causal LM folder or Hub name that vLLM can load"
    )
    out: str = Field(
        description=(
            ".jsonl file to write; a stopped run continues with the missing chats"
        )
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts to answer; without them, the model writes the "
        "user turns itself, from the beginning of its chat template (Magpie, arXiv "
        "2406.08464), or whole texts if it has no template",
    )
    number: int | None = Field(
        None, ge=1, description="chats to write (default 1000, or one per prompt)"
    )
    system: str | None = Field(
        None,
        description="system prompt of chats without one (default: the chat template's)",
    )
    temperature: float = Field(
        0.8, ge=0, description="temperature of the responses; 0 is greedy"
    )
    top_p: float = Field(0.95, gt=0, le=1, description="top-p of the responses")
    max_tokens: int = Field(512, ge=1, description="most tokens of a response")
    prompt_tokens: int = Field(
        64, ge=1, description="tokens at a text's beginning that form the prompt"
    )
    max_length: int = Field(
        2048,
        ge=2,
        description="most tokens of prompt and response; longer prompts are skipped",
    )
    batch: int = Field(
        256,
        ge=1,
        description="chats generated together; a killed run loses one batch at most",
    )
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype; auto: the model's, or float32 on CPUs without bfloat16 "
        "instructions",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of KV cache, for machines whose memory is shared (default: "
        "all free memory)",
    )
    seed: int = Field(0, description="seed; each chat derives its own from it")
    tensor_parallel_size: TensorParallel = 1
    trust_remote_code: TrustRemoteCode = False


class TrainingOptions(Options):
    """Options that all kinds of heads share."""

    kind: ClassVar[str]
    free = frozenset(
        {
            "out",
            "save_every",
            "device",
            "evaluation_tokens",
            "license",
            "states_cache_gb",
            "tensor_parallel_size",
            "learning_rate",
            "base_learning_rate",
            "stem_learning_rate",
        }
    )

    model: str = Field(
        description="target: a causal LM folder or hub name that transformers can load"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description=".jsonl or .json files (ppd data's, or text, chats, prompts, "
        "completions), plain text, or folders",
    )
    out: str = Field(
        description=(
            "heads folder to write; a stopped run continues from its checkpoint there"
        )
    )
    train_on_prompts: bool = Field(
        False,
        description="include prompts in the loss if the data separates prompts from "
        "responses",
    )
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(
        None, ge=1, description="optimiser steps (default: set by --epochs)"
    )
    sequence_length: int = Field(
        1024, ge=8, description="tokens per packed window"
    )
    batch_size: int = Field(
        16, ge=1, description="windows per optimiser step, over all processes"
    )
    accumulation: int = Field(
        1,
        ge=1,
        description="parts in which a step's windows are computed, to save memory",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="AdamW (the papers), or Muon for the heads' matrices and AdamW "
        "for the rest",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="peak learning rate of the heads"
    )
    warmup: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="share of the steps with a rising rate; a cosine follows",
    )
    betas: Annotated[tuple[float, float], COMMAS] = Field(
        (0.9, 0.95),
        description="AdamW's betas (DynaMo, A.1; the others name none); the first is "
        "Muon's momentum",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    gradient_clip: float = Field(
        1.0,
        gt=0,
        description="largest gradient norm, separately for heads and base model",
    )
    position_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the positions from which a step learns",
    )
    precision: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="dtype of the target and of autocast; the heads' master weights "
        "stay float32",
    )
    stored_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of the saved heads"
    )
    held_out: float = Field(
        0.02,
        gt=0,
        lt=0.5,
        description="share of the prompts and texts held out for evaluation",
    )
    evaluation_tokens: int = Field(
        65_536, ge=1, description="held-out tokens that an evaluation reads"
    )
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="steps between further evaluations; the weights of the best one "
        "are written",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this many evaluations without 0.1 % more accepted "
        "held-out drafts",
    )
    states_cache: str | None = Field(
        None,
        description="folder that caches the frozen target's states for further "
        "epochs and runs on the data",
    )
    states_cache_gb: float = Field(
        20.0, gt=0, description="size limit of that folder in GB"
    )
    states_from: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="what computes these states: transformers beside the heads, or vLLM "
        "before the training, whose processes then hold only the target's embeddings, "
        "final norm and LM head",
    )
    tensor_parallel_size: TensorParallel = 1
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    num_speculative_tokens: int = Field(
        3, ge=1, le=16, description="drafts per step that the heads recommend"
    )
    seed: int = Field(
        0, description="seed of the initial heads and of the order of the data"
    )
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one",
    )
    trust_remote_code: TrustRemoteCode = False
    license: str = Field(
        "other",
        pattern=r"^[a-z0-9.-]+$",
        description="licence of the heads for their model card, as the Hub names it, "
        "such as apache-2.0",
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and below 1")
        return value

    def essence(self) -> dict[str, Any]:
        options = super().essence()
        # Without a cache, the windows of later epochs start elsewhere.
        options["states_cache"] = self.states_cache is not None
        return {"kind": self.kind, **options}


class HeadsOptions(TrainingOptions):
    """Options of heads that may be trained over a part of the vocabulary."""

    optimizer: Literal["adamw", "muon"] = Field(
        "muon",
        description="Muon for the heads' matrices and AdamW for the rest, or AdamW "
        "alone (the papers' optimizer, where they name one)",
    )
    train_vocab_size: int = Field(
        0,
        ge=0,
        description="train over the most frequent tokens of the data only, and draft "
        "from them (0: all tokens)",
    )


class FullOptions(HeadsOptions):
    """Options of heads that also learn the target's distribution, and may train the target."""

    recipe: Literal["heads", "full"] = Field(
        "heads",
        description="train the heads alone, or the base model with them (the papers; "
        "writes OUT/base)",
    )
    base_learning_rate: float = Field(
        1e-5,
        ge=0,
        description="peak learning rate of the base model (full recipe)",
    )
    distillation: float = Field(
        1.0,
        ge=0,
        le=1,
        description="weight of distillation, the cross-entropy to the target's top-k "
        "probabilities; the rest is the negative log-likelihood of the data",
    )
    distillation_top_k: int = Field(
        16, ge=1, le=256, description="number of likeliest tokens to distil"
    )

    @model_validator(mode="after")
    def _whole_lm_head(self) -> Self:
        if self.recipe == "full" and self.train_vocab_size:
            raise ValueError(
                "the full recipe trains the whole LM head; omit --train-vocab-size"
            )
        return self


class CalibrationOptions(Options):
    """Measure how many drafts of a heads folder are accepted, and store the best setting in it."""

    heads: str = Field(
        description="heads folder to measure; calibration.json is written into it"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description="text that the heads were not trained on: .jsonl, .json, plain "
        "text, or folders",
    )
    model: str | None = Field(
        None,
        validation_alias=AliasChoices("model", "target"),
        description="target (default: that of the heads)",
    )
    prompts: int = Field(
        64, ge=1, description="number of prompts, from records or pieces of texts"
    )
    prompt_tokens: int = Field(
        64, ge=1, description="length of a prompt taken from a text, in tokens"
    )
    new_tokens: int = Field(
        128, ge=2, description="tokens the target writes after each prompt"
    )
    temperature: float = Field(
        0.8, gt=0, description="temperature of the sampled texts"
    )
    drafts: int = Field(
        5, ge=1, le=16, description="most drafts per step to consider"
    )
    eps: Annotated[tuple[Share, ...], COMMAS] = Field(
        (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
        min_length=1,
        description="DynaMo's back-off thresholds eps_b to compare",
    )
    batch: int = Field(16, ge=1, description="texts computed together")
    recommend: bool = Field(
        True, description="write the best setting into the heads' config"
    )
    precision: Literal["bfloat16", "float32"] = Field(
        "float32", description="dtype in which the target computes"
    )
    seed: int = Field(0, description="seed of the sampled texts")
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one",
    )
    trust_remote_code: TrustRemoteCode = False
