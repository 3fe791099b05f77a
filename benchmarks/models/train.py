# SPDX-License-Identifier: Apache-2.0
"""Train the demo model from nothing on the standard library's sources.

    python -m vllm_ppd.benchmarks.models.train                # about 80 minutes on one core
    python -m vllm_ppd.benchmarks.models.train --vocabulary 257 --out build/bytes/model   # of bytes: see demo/README.md
    python -m vllm_ppd.benchmarks.models.train --steps 20 --out /tmp/try

Stopped (Ctrl-C, kill) it continues from its last checkpoint when started again with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.benchmarks.models.training import fit, muon_and_adamw, spaced, window
from vllm_ppd.heads.training.provenance import provenance

DEMO = Path(__file__).resolve().parent.parent / "demo"
END = "<|endoftext|>"
CONTEXT = 1024
HEAD = 32  # size of an attention head; three share keys and values
CHECKPOINT_EVERY = 200  # steps


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be written, so structured output and any prompt work."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def build_config(tokenizer: PreTrainedTokenizerFast, layers: int = 12, hidden: int = 192) -> LlamaConfig:
    """12 layers, so that exits mean something; 4.6M parameters, so that it lives in a repository."""
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD, num_key_value_heads=hidden // (3 * HEAD), head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All documents in one row of token ids, each closed by the end token."""
    ids: list[int] = []
    for start in range(0, len(texts), 64):
        for row in tokenizer(texts[start : start + 64])["input_ids"]:
            ids += [*row, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.int32)


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, ids: torch.Tensor, windows: int = 64) -> float:
    """Mean negative log-likelihood in nats a token over evenly spaced windows of CONTEXT tokens."""
    rows = spaced(ids, windows, CONTEXT)[:, None]
    return sum(float(model(input_ids=row, labels=row).loss) for row in rows) / windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO / "model")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the BPE; 257 leaves bytes alone")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=192, help=f"a multiple of {3 * HEAD}")
    parser.add_argument("--steps", type=int, default=2400, help="0 writes the model untrained")
    parser.add_argument("--batch", type=int, default=4, help="windows of 1024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate of AdamW: embeddings and norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of Muon: the layers' matrices")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with only_writer(args.out):
        train(args)


def train(args: argparse.Namespace) -> None:
    """Train and write the folder."""
    torch.manual_seed(args.seed)
    train_texts, validation_texts = split()
    tokenizer = build_tokenizer(train_texts, args.vocabulary)
    train_ids, validation_ids = encode(tokenizer, train_texts), encode(tokenizer, validation_texts)
    model: Any = LlamaForCausalLM(build_config(tokenizer, args.layers, args.hidden))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(train_ids):,} training tokens, {len(validation_ids):,} validation tokens, {parameters:,} parameters")

    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    optimizers = muon_and_adamw(model, matrices, args.muon_lr, args.lr)
    checkpoint = args.out / "training.ckpt"
    first, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, spent = state["step"], state["spent"]
    compiled = torch.compile(model)
    started = time.monotonic()

    def loss_of(step: int) -> torch.Tensor:
        rows = window(train_ids, step, args.batch, CONTEXT, args.seed)
        return compiled(input_ids=rows, labels=rows).loss

    def save(done: int) -> None:
        if done % CHECKPOINT_EVERY or done == args.steps:
            return
        state = {"model": model.state_dict(), "step": done, "spent": spent + time.monotonic() - started}
        torch.save(state | {"optimizers": [o.state_dict() for o in optimizers]}, checkpoint.with_suffix(".part"))
        os.replace(checkpoint.with_suffix(".part"), checkpoint)

    warm_up = max(1, args.steps * 3 // 100)
    fit(loss_of, optimizers, args.steps, warm_up, [list(model.parameters())], first, save)
    spent += time.monotonic() - started

    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # The loss that is reported is that of the weights that are shipped.
    loss = validation_loss(model.float(), validation_ids)
    facts = provenance(
        corpus=f"standard library of Python {platform.python_version()}",
        training_tokens_in_corpus=len(train_ids), training_tokens_seen=args.steps * args.batch * CONTEXT,
        parameters=parameters, seconds=round(spent), validation_loss_nats_per_token=round(loss, 4),
        validation_perplexity=round(math.exp(loss), 3),
        settings={"context": CONTEXT, **{k: v for k, v in vars(args).items() if k != "out"}},
    )  # fmt: skip
    (args.out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
