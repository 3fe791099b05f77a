# SPDX-License-Identifier: Apache-2.0
"""Train the demo model from nothing on the standard library's sources.

    python benchmarks/demo/train.py                # about 80 minutes on one core
    python benchmarks/demo/train.py --vocabulary 257 --out build/bytes/model    # of bytes: see README.md
    python benchmarks/demo/train.py --steps 20 --out /tmp/try

Stopped (Ctrl-C, kill) it continues from its last checkpoint when started again with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import torch
from corpus import split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_ppd.heads.training.provenance import provenance

HERE = Path(__file__).resolve().parent
END = "<|endoftext|>"
CONTEXT = 1024


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be written, so structured output and any prompt work."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """12 layers, so that exits mean something; 4.6M parameters, so that it lives in a repository."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


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
    starts = torch.linspace(0, len(ids) - CONTEXT - 1, windows).long()
    total = 0.0
    for start in starts.tolist():
        row = ids[start : start + CONTEXT].long()[None]
        total += model(input_ids=row, labels=row).loss.item()
    return total / windows


def save_atomically(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the BPE; 257 leaves bytes alone")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=4, help="windows of 1024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate of AdamW: embeddings and norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of Muon: the layers' matrices")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_texts, validation_texts = split()
    tokenizer = build_tokenizer(train_texts, args.vocabulary)
    train_ids, validation_ids = encode(tokenizer, train_texts), encode(tokenizer, validation_texts)
    model = LlamaForCausalLM(build_config(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(train_ids):,} training tokens, {len(validation_ids):,} validation tokens, {parameters:,} parameters")

    # Muon for the matrices of the layers: at this size it needs a quarter of AdamW's tokens for the same loss.
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    peaks = (args.muon_lr, args.lr)
    warmup = max(1, args.steps * 3 // 100)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "training.ckpt"
    step, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent = state["step"], state["spent"]
    compiled = torch.compile(model)
    progress = tqdm(initial=step, total=args.steps, mininterval=10)
    started = time.monotonic()
    while step < args.steps:
        # The order depends on the step alone, so a resumed run sees what the unbroken one would have.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(train_ids) - CONTEXT, (args.batch,), generator=generator)
        rows = torch.stack([train_ids[s : s + CONTEXT] for s in starts.tolist()]).long()
        done = step / args.steps
        scale = min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(input_ids=rows, labels=rows).loss
        if not torch.isfinite(loss):
            sys.exit(f"training diverged at step {step}: loss {loss.item()}; lower --lr (last checkpoint kept)")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1
        progress.update()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}", tokens=f"{step * args.batch * CONTEXT:,}")
        if step % 200 == 0 and step < args.steps:
            state = {"model": model.state_dict(), "step": step, "spent": spent + time.monotonic() - started}
            save_atomically(state | {"optimizers": [o.state_dict() for o in optimizers]}, checkpoint)
    progress.close()
    spent += time.monotonic() - started

    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # The loss that is reported is that of the weights that are shipped.
    loss = validation_loss(model.float(), validation_ids)
    facts = provenance(
        command=" ".join(["python", "benchmarks/demo/train.py", *sys.argv[1:]]),
        corpus=f"standard library of Python {platform.python_version()}",
        training_tokens_in_corpus=len(train_ids),
        training_tokens_seen=args.steps * args.batch * CONTEXT,
        parameters=parameters,
        seconds=round(spent),
        validation_loss_nats_per_token=round(loss, 4),
        validation_perplexity=round(math.exp(loss), 3),
        settings={
            "vocabulary": len(tokenizer),
            "steps": args.steps,
            "batch": args.batch,
            "context": CONTEXT,
            "lr": args.lr,
            "muon_lr": args.muon_lr,
            "seed": args.seed,
        },
    )
    (args.out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
