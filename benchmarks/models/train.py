# SPDX-License-Identifier: Apache-2.0
"""Train the demo model on the standard library's sources: `python -m
vllm_ppd.benchmarks.models train`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_ppd.benchmarks.models.eagle import ModelOptions, ModelRecipe
from vllm_ppd.heads.training.loop import train
from vllm_ppd.heads.training.recipe import Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

END = "<|endoftext|>"
CONTEXT = 1024
HEAD = 32  # size of an attention head; three share keys and values
UNTRAINED = "untrained"  # folder in the output, while the model is trained


class DemoOptions(ModelOptions):
    """A small Llama: 12 layers, so that exits are meaningful, and 4.6M parameters, so
    that it fits in a repository.
    """

    kind: ClassVar[str] = "demo model"

    model: str = ""  # the untrained model
    recipe: Literal["full"] = "full"
    data: tuple[str, ...] = Field(
        ("build/corpus/train.jsonl",),
        description="texts, as `models corpus` writes them",
    )
    out: str = Field(
        "benchmarks/demo/model",
        description="folder of the model; a stopped run continues there",
    )
    vocabulary: int = Field(
        4096, ge=257, description="tokens of the BPE; 257 leaves bytes alone"
    )
    layers: int = Field(12, ge=1, description="decoder layers")
    hidden: int = Field(
        192,
        ge=96,
        multiple_of=3 * HEAD,
        description=f"hidden size, a multiple of {3 * HEAD}",
    )
    steps: int | None = Field(2400, ge=1, description="optimizer steps")
    batch_size: int = Field(4, ge=1, description="windows of 1,024 tokens a step")
    others_rate: float = Field(
        3e-3, gt=0, description="peak learning rate of AdamW: embeddings and norms"
    )


class DemoModel(ModelRecipe):
    """A recipe that trains all weights of the target on the next token."""

    def __init__(self, options: DemoOptions, target: Target) -> None:
        super().__init__(options, target)
        self.model: Any = target.model

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.model.model.layers.parameters() if p.dim() == 2]

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        tokens, known = batch.ahead(1)
        nats = -self.target.log_probs(self.states(batch).final[known], tokens[known, 0])
        return nats.mean(), {"nats": nats.detach().sum(), "tokens": known.sum()}

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {"nats_a_token": round(counts["nats"] / counts["tokens"], 4)}

    def write(self, out: Path, provenance: str) -> None:
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.target.tokenizer.save_pretrained(out)
        shutil.rmtree(out / UNTRAINED)
        (out / "provenance.json").write_text(provenance)


def run(options: DemoOptions) -> int:
    """Train the model and write its folder, with its held-out likelihood in provenance.json."""
    out = Path(options.out)
    untrained = out / UNTRAINED
    if not (untrained / "config.json").exists():
        lines = [
            line
            for path in options.data
            for line in Path(path).read_text().splitlines()
        ]
        tokenizer = build_tokenizer(
            [json.loads(line)["text"] for line in lines], options.vocabulary
        )
        torch.manual_seed(options.seed)
        model: Any = LlamaForCausalLM(
            build_config(tokenizer, options.layers, options.hidden)
        )
        model.save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
    train(options.model_copy(update={"model": str(untrained)}), DemoModel)
    print(f"wrote {out}")
    return 0


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text, so that structured output
    and any prompt work.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocabulary, min_frequency=0, show_progress=False, special_tokens=[END]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()),
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
    )


def build_config(
    tokenizer: PreTrainedTokenizerFast, layers: int, hidden: int
) -> LlamaConfig:
    """The configuration of a Llama with the options' depth and width."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // (3 * HEAD),
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
