# SPDX-License-Identifier: Apache-2.0
"""Train a peer of the demo model.

python -m vllm_ppd.benchmarks.models.peers.train medusa --heads 4 --steps 480           # build/peers/medusa
python -m vllm_ppd.benchmarks.models.peers.train eagle --steps 480 --model build/bytes/model --out build/bytes/eagle
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_ppd.benchmarks.models.peers.draft_model import DraftModel
from vllm_ppd.benchmarks.models.peers.eagle import Eagle
from vllm_ppd.benchmarks.models.peers.medusa import Medusa
from vllm_ppd.benchmarks.models.peers.target import WINDOW, Peer, Target
from vllm_ppd.benchmarks.models.train import DEMO
from vllm_ppd.benchmarks.models.training import fit, muon_and_adamw, window
from vllm_ppd.heads.training.provenance import provenance

MUON_RATE = 0.02
STEPS = {"medusa": 120, "eagle": 120, "draft_model": 240}


def made(name: str, target: Target, heads: int) -> Peer:
    return {"medusa": lambda: Medusa(target, heads), "eagle": lambda: Eagle(target),
            "draft_model": lambda: DraftModel(target)}[name]()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(STEPS))
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="target")
    parser.add_argument("--out", type=Path, help="default: build/peers/PEER")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--heads", type=int, default=3, help="of Medusa")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out, steps = args.out or Path("build/peers") / args.peer, args.steps or STEPS[args.peer]
    target = Target(args.model, steps * args.batch * WINDOW, args.seed)
    peer = made(args.peer, target, args.heads)
    if peer.by_muon:
        optimizers = muon_and_adamw(peer, peer.matrices, MUON_RATE, peer.learning_rate)
    else:
        optimizers = [torch.optim.AdamW(peer.parameters(), lr=peer.learning_rate)]
    clipped = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    started = time.monotonic()

    def loss_of(step: int) -> torch.Tensor:
        return peer.loss(window(target.training, step, args.batch, WINDOW, args.seed))

    fit(loss_of, optimizers, steps, max(1, steps // 30), clipped)
    seconds = round(time.monotonic() - started)
    with torch.no_grad():
        held_out = {what: round(value, 4) for what, value in peer.held_out(target.held_out()).items()}
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in peer.tensors().items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(peer.config() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    if args.peer == "draft_model":
        target.tokenizer.save_pretrained(out)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    tokens = steps * args.batch * WINDOW
    facts = provenance(settings=settings | {"steps": steps}, seconds=seconds, tokens=tokens, held_out=held_out)
    (out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{out}: {tokens:,} tokens in {seconds} s; held out: {json.dumps(held_out)}")


if __name__ == "__main__":
    main()
