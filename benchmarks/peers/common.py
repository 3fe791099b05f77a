# SPDX-License-Identifier: Apache-2.0
"""What the peers' trainings share: the frozen demo model, the corpus that our heads were trained on, and a loop."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.heads.training.provenance import provenance

DEMO = Path(__file__).resolve().parent.parent / "demo"
WINDOW = 512  # tokens
HELD_OUT = 32  # windows


def arguments(description: str | None, name: str, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """The flags that every peer has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="target")
    parser.add_argument("--out", type=Path, default=Path("build/peers") / name)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="learning rate of Muon, where it is used")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class Target:
    """The frozen target, with as much of the corpus in its tokens as a training needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        sys.path.insert(0, str(DEMO))
        from corpus import split

        torch.manual_seed(args.seed)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).requires_grad_(False).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.config = self.model.config
        training, validation = split()
        random.Random(args.seed).shuffle(training)
        self.training = self._encode(training, args.steps * args.batch * WINDOW)
        self.validation = self._encode(validation, 4 * HELD_OUT * WINDOW)

    def _encode(self, texts: list[str], wanted: int) -> torch.Tensor:
        """The first documents that have so many tokens together."""
        ids: list[int] = []
        for text in texts:
            ids += [*self.tokenizer(text, verbose=False)["input_ids"], self.tokenizer.eos_token_id]
            if len(ids) >= max(wanted, 2 * WINDOW):
                break
        return torch.tensor(ids)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """States after the final norm, which is what vLLM hands to a drafter: [rows, tokens, d]."""
        return self.model.model(input_ids=ids).last_hidden_state

    def windows(self, step: int, count: int, seed: int) -> torch.Tensor:
        """Windows of the training tokens; which ones depends on step and seed alone: [count, WINDOW]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - WINDOW, (count,), generator=generator)
        return torch.stack([self.training[start : start + WINDOW] for start in starts.tolist()])

    def held_out(self) -> torch.Tensor:
        """Evenly spaced windows of held-out tokens: [HELD_OUT, WINDOW]."""
        starts = torch.linspace(0, len(self.validation) - WINDOW - 1, HELD_OUT).long()
        return torch.stack([self.validation[start : start + WINDOW] for start in starts.tolist()])


def optimizers_of(
    model: nn.Module, matrices: list[nn.Parameter], args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Muon for a model's matrices, which needs a quarter of AdamW's tokens at this size, and AdamW for the rest."""
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=args.matrix_rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(
    target: Target,
    args: argparse.Namespace,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """Minimise loss_of(windows) for args.steps, with warm-up and a cosine; returns seconds."""
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    warm_up = max(1, args.steps // 30)
    started = time.monotonic()
    progress = tqdm(range(args.steps), mininterval=5)
    for step in progress:
        scale = min((step + 1) / warm_up, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(target.windows(step, args.batch, args.seed))
        if not torch.isfinite(loss):
            sys.exit(f"training diverged at step {step}: loss {loss.item()}; lower --learning-rate")
        loss.backward()
        for optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    return time.monotonic() - started


def save(out: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint in bfloat16, as vLLM reads it."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2) + "\n")


def tell(args: argparse.Namespace, seconds: float, held_out: dict[str, float]) -> None:
    """Provenance beside the checkpoint."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    facts = provenance(
        settings=settings, seconds=round(seconds), tokens=args.steps * args.batch * WINDOW, held_out=held_out
    )
    (args.out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{args.out}: {facts['tokens']:,} tokens in {seconds:.0f} s; held out: {json.dumps(held_out)}")
