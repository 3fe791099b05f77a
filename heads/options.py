# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd fit`, `ppd data`, `ppd train` and `ppd calibrate`, declared once: flags,
help and errors are made from them. This module imports nothing heavy.

Defaults of training are the paper's if it names one.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)
from typing_extensions import Self

from vllm_ppd.heads.planning import Share
from vllm_ppd.heads.text import COMMAS

TrustRemoteCode = Annotated[
    bool, Field(description="run code that comes with the model")
]
Device = Annotated[
    str,
    Field(description="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one"),
]
License = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9.-]+$",
        max_length=64,
        description="license of the heads for their model card, as the Hub names it, "
        "such as apache-2.0",
    ),
]
PromptTokens = Annotated[
    int,
    Field(
        ge=1,
        description="number of leading tokens of a plain text that form its prompt",
    ),
]
Beta = Annotated[float, Field(ge=0, lt=1)]
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
    # Those that --help lists (empty: all); --help=all lists all
    basic: ClassVar[frozenset[str]] = frozenset()

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        return self.model_dump(mode="json", exclude=set(self.free))


class FitOptions(Options):
    """Write data, then train and calibrate heads, within a time limit."""

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
            "heads folder to write (default: the model's name with -ppd). OUT.fit keeps "
            "the data and the progress of a run that was stopped"
        ),
    )
    minutes: float = Field(
        60.0,
        gt=0,
        description="time limit: half for the data, 40 % for training, the rest for "
        "calibration",
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts that resemble your traffic (default: 300 built-in "
        "prompts, and prompts that the model writes)",
    )
    seed: int = Field(0, description="seed of the texts and of the training")
    tensor_parallel_size: TensorParallel = 1
    trust_remote_code: TrustRemoteCode = False
    license: License = "other"


class DataOptions(Options):
    """Let the target answer prompts, or write user turns and answer them."""

    free = frozenset(
        {
            "out",
            "num_chats",
            "batch_size",
            "dtype",
            "kv_cache_gib",
            "tensor_parallel_size",
            "trust_remote_code",
        }
    )
    basic = frozenset(
        {"model", "out", "prompts", "num_chats", "temperature", "max_tokens"}
    )

    model: str = Field(
        description="target: a causal LM folder or Hub name that vLLM can load"
    )
    out: str = Field(
        description=(
            ".jsonl file to write; the same command adds the chats that are missing"
        )
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts to answer (default: the model writes user turns "
        "from the beginning of its chat template (Magpie, arXiv 2406.08464), or whole "
        "texts if it has no template)",
    )
    num_chats: int | None = Field(
        None,
        ge=1,
        description="number of chats to write (default: 1000, or one per prompt)",
    )
    system: str | None = Field(
        None,
        description="system prompt for chats that have none (default: that of the chat "
        "template)",
    )
    temperature: float = Field(
        0.8, ge=0, description="temperature of the responses; 0 is greedy"
    )
    top_p: float = Field(0.95, gt=0, le=1, description="top-p of the responses")
    max_tokens: int = Field(
        512, ge=1, description="maximum number of tokens in a response"
    )
    prompt_tokens: PromptTokens = 64
    max_model_len: int = Field(
        2048,
        ge=2,
        description="maximum number of tokens in prompt and response, at most the "
        "model's; longer prompts are skipped",
    )
    batch_size: int = Field(
        256,
        ge=1,
        description="chats generated at once; a run that is killed loses at most one "
        "batch",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of the model; auto: as stored, or float32 on a CPU without "
        "bfloat16 instructions",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="size of the KV cache in GiB (default: free memory)",
    )
    seed: int = Field(
        0, description="seed, from which each chat derives its own seed"
    )
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
            "states_cache",
            "states_cache_gib",
            "tensor_parallel_size",
            "learning_rate",
            "base_learning_rate",
            "stem_learning_rate",
        }
    )
    basic = frozenset(
        {
            "model",
            "data",
            "out",
            "steps",
            "epochs",
            "batch_size",
            "num_speculative_tokens",
            "evaluate_every",
            "dtype",
            "license",
            "exit_layers",
            "layers",
            "rank",
            "recipe",
            "train_vocab_size",
        }
    )

    model: str = Field(
        description="target: a causal LM folder or Hub name that transformers can load"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description=".jsonl or .json files (ppd data's, or text, chats, prompts, "
        "completions), plain text, or folders",
    )
    out: str = Field(
        description=(
            "heads folder to write; the same command continues from a checkpoint in it"
        )
    )
    train_on_prompts: bool = Field(
        False,
        description="also learn prompts, where the data separates prompts from "
        "responses",
    )
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(
        None, ge=1, description="optimizer steps (default: set by --epochs)"
    )
    sequence_length: int = Field(
        1024, ge=8, description="tokens per packed window"
    )
    batch_size: int = Field(
        16, ge=1, description="windows per optimizer step, over all processes"
    )
    accumulation: int = Field(
        1,
        ge=1,
        description="number of parts in which a step computes its windows, to save "
        "memory",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "muon",
        description="Muon for the heads' matrices and AdamW for the rest, or AdamW "
        "alone (the papers' optimizer, where they name one)",
    )
    learning_rate: float = Field(
        1e-3,
        gt=0,
        description="peak learning rate of the heads (DynaMo's LR_M, Table 5)",
    )
    warmup: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="fraction of the steps in which the learning rate rises; a cosine "
        "follows",
    )
    betas: Annotated[tuple[Beta, Beta], COMMAS] = Field(
        (0.9, 0.95),
        description="betas of AdamW (DynaMo, A.1); the first is the momentum of Muon",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    gradient_clip: float = Field(
        1.0,
        gt=0,
        description="maximum gradient norm, separately for heads and base model",
    )
    position_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the positions from which a step learns, resampled in "
        "every step",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of the target and of autocast; auto: bfloat16, or float32 on "
        "a CPU without bfloat16 instructions; the heads' master weights stay float32",
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of the saved heads"
    )
    held_out_fraction: float = Field(
        0.02,
        gt=0,
        lt=0.5,
        description="fraction of the prompts and texts held out for evaluation",
    )
    evaluation_tokens: int = Field(
        65_536, ge=1, description="number of held-out tokens per evaluation"
    )
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="steps between evaluations during training; the weights of the "
        "best one are written",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this many evaluations that do not accept 0.1 % more "
        "held-out drafts",
    )
    states_cache: str | None = Field(
        None,
        description="folder that caches the states of the frozen target for later "
        "epochs and runs on the same data",
    )
    states_cache_gib: float = Field(
        20.0,
        gt=0,
        description="maximum size of a training's states in --states-cache, in GiB",
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
        3,
        ge=1,
        le=16,
        description="drafts per step for which the heads are trained, or which they "
        "recommend",
    )
    seed: int = Field(
        0, description="seed of the initial heads and of the order of the data"
    )
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    license: License = "other"

    def essence(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().essence()}


class HeadsOptions(TrainingOptions):
    """Options of heads that may be trained over a part of the vocabulary."""

    train_vocab_size: int | None = Field(
        0,
        ge=0,
        description="train over the most frequent tokens of the answers only, and "
        "draft from them (0: all tokens)",
    )


class FullOptions(HeadsOptions):
    """Options of heads that also learn the target's distribution, and may train the target."""

    recipe: Literal["heads", "full"] = Field(
        "heads",
        description="train only the heads, or also the base model (the papers; writes "
        "OUT/base)",
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
        16, ge=1, le=256, description="number of likeliest tokens to distill"
    )

    @property
    def distilled(self) -> int:
        """How many of the target's likeliest tokens are distilled."""
        return self.distillation_top_k if self.distillation else 0

    @model_validator(mode="after")
    def _whole_lm_head(self) -> Self:
        if self.recipe == "full" and self.train_vocab_size:
            raise ValueError(
                "the full recipe trains the whole LM head; omit --train-vocab-size"
            )
        return self


class CalibrationOptions(Options):
    """Measure how many drafts of a heads folder are accepted, and store the best setting in it."""

    basic = frozenset(
        {
            "heads",
            "data",
            "model",
            "num_prompts",
            "output_len",
            "num_speculative_tokens",
            "dtype",
        }
    )

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
        description="target (default: the target that the heads name)",
    )
    num_prompts: int = Field(
        64, ge=1, description="number of prompts, from records or pieces of texts"
    )
    prompt_tokens: PromptTokens = 64
    output_len: int = Field(
        128, ge=2, description="tokens that the target writes after each prompt"
    )
    temperature: float = Field(
        0.8, gt=0, description="temperature of the sampled texts"
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=16,
        description="maximum number of drafts per step to consider (default: as many as "
        "the heads make, and 5 of early heads)",
    )
    eps_b: Annotated[tuple[Share, ...], COMMAS] = Field(
        (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
        min_length=1,
        description="back-off thresholds of DynaMo heads to compare",
    )
    batch_size: int = Field(16, ge=1, description="texts computed at once")
    recommend: bool = Field(
        True, description="write the best setting into config.json of the heads"
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "float32", description="dtype of the target"
    )
    seed: int = Field(0, description="seed of the sampled texts")
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
