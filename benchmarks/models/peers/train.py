# SPDX-License-Identifier: Apache-2.0
"""Train a peer: of the demo model on its corpus, or of any target on the data that our heads were trained on.

python -m vllm_ppd.benchmarks.models.peers.train medusa --heads 4 --steps 480           # build/peers/medusa
python -m vllm_ppd.benchmarks.models.peers.train eagle --model M --data chats.jsonl --batch 4 --states-cache DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.models.peers.draft_model import DraftModel
from vllm_ppd.benchmarks.models.peers.eagle import Eagle
from vllm_ppd.benchmarks.models.peers.medusa import Medusa
from vllm_ppd.benchmarks.models.peers.target import Corpus, Given, Peer
from vllm_ppd.benchmarks.models.train import DEMO
from vllm_ppd.benchmarks.models.training import fit, muon_and_adamw
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.heads.training.target import Target

MUON_RATE = 0.02
STEPS = {"medusa": 120, "eagle": 120, "draft_model": 240}


def made(name: str, target: Target, heads: int, share: float) -> Peer:
    """An untrained peer."""
    if name == "draft_model":
        return DraftModel(target)
    return Medusa(target, heads, share) if name == "medusa" else Eagle(target, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(STEPS))
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="target")
    parser.add_argument("--out", type=Path, help="default: build/peers/PEER")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}; with --data one epoch")
    parser.add_argument("--batch", type=int, default=8, help="windows a step, of 512 tokens; with --data of 1,024")
    parser.add_argument("--heads", type=int, default=3, help="of Medusa")
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="as of ppd train (default: the corpus)")
    parser.add_argument("--states-cache", type=Path, metavar="DIR", help="as of ppd train, with --data")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the target")
    parser.add_argument("--position-share", type=float, default=1.0, help="share of positions in vocabulary losses")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu (default), cuda, ...")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out = args.out or Path("build/peers") / args.peer
    try:
        with only_writer(args.out):
            train(args)
    except TrainingError as error:
        sys.exit(f"peers.train: {error}")


def train(args: argparse.Namespace) -> None:
    """Train and write the folder.

    Raises:
        TrainingError: if the target or the data cannot be read.
    """
    out = args.out
    torch.manual_seed(args.seed)
    target = Target(str(args.model), args.device, getattr(torch, args.precision))
    steps = args.steps or STEPS[args.peer]
    source: Corpus | Given
    if args.data:
        source = Given(target, args.data, out / ".tokens", args.states_cache, args.batch, args.seed)
        steps = args.steps or source.steps
    else:
        source = Corpus(target, steps, args.batch, args.seed)
    peer = made(args.peer, target, args.heads, args.position_share).to(args.device)
    if peer.by_muon:
        optimizers = muon_and_adamw(peer, peer.matrices, MUON_RATE, peer.learning_rate)
    else:
        optimizers = [torch.optim.AdamW(peer.parameters(), lr=peer.learning_rate)]
    clipped = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    started, tokens = time.monotonic(), 0

    def loss_of(step: int) -> torch.Tensor:
        nonlocal tokens
        batch = source.training(step).to(args.device)
        tokens += batch.num_tokens
        return peer.loss(batch, source.states(batch).float())

    fit(loss_of, optimizers, steps, max(1, steps // 30), clipped, device=args.device.type)
    seconds = round(time.monotonic() - started)
    peer.eval()
    with torch.no_grad():
        batch = source.held_out().to(args.device)
        found = peer.held_out(batch, source.states(batch).float())
    held_out = {what: round(value, 4) for what, value in found.items()}
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in peer.tensors().items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(peer.config() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    if args.peer == "draft_model":
        target.tokenizer.save_pretrained(out)
    settings = {
        name: value if isinstance(value, int | float | None) else str(value) for name, value in vars(args).items()
    }
    facts = provenance(settings=settings | {"steps": steps}, seconds=seconds, tokens=tokens, held_out=held_out)
    (out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{out}: {tokens:,} tokens in {seconds} s; held out: {json.dumps(held_out)}")


if __name__ == "__main__":
    main()
