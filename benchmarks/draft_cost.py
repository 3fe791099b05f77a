# SPDX-License-Identifier: Apache-2.0
"""What drafting with CP and DynaMo heads costs beside a full pass, and where the time goes.

    python benchmarks/draft_cost.py                                   # 398M parameters, 32K vocabulary, bf16, batch 1
    python benchmarks/draft_cost.py --batch 1 8 --out benchmarks/results/draft_cost.json

Engines in one process, vLLM alone, with a CP head and with DynaMo token heads, each with the draft vocabulary that the
heads recommend and with the whole vocabulary, take turns; medians of single engine steps. Heads are random: what they
cost does not depend on what they say.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from engines import TimedStack, Timers, drafter_of, model_arguments, report, start, steps, write_config


def write_heads(folder: Path, kind: str, args: argparse.Namespace) -> Path:
    """A heads folder of random weights."""
    from vllm_ppd.heads.checkpoint import save_heads
    from vllm_ppd.heads.config import CPConfig, DynaMoConfig, TargetLayers

    target = TargetLayers(
        model_type="llama", hidden_size=args.hidden, vocab_size=args.vocab, num_hidden_layers=args.layers
    )
    shared: dict[str, Any] = {
        "verifier": "random", "target": target, "dtype": args.dtype, "draft_vocab_size": args.draft_vocab,
    }  # fmt: skip
    config: Any
    if kind == "cp":
        config = CPConfig(
            **shared, rank=args.rank, positions=args.drafts + 1, num_speculative_tokens=args.drafts, token_counts=True
        )
    else:
        d, inner = args.hidden, args.hidden * 7 // 2
        square = {f"self_attn.{name}_proj.weight": [d, d] for name in "qkvo"}
        norms = {"input_layernorm.weight": [d], "post_attention_layernorm.weight": [d]}
        mlp = {"mlp.gate_proj.weight": [inner, d], "mlp.up_proj.weight": [inner, d], "mlp.down_proj.weight": [d, inner]}
        config = DynaMoConfig(
            **shared,
            tokens=args.tokens,
            num_speculative_tokens=args.tokens - 1,
            layer_tensors=square | norms | mlp,
            cooccurrence_entries=dict.fromkeys(range(2, args.tokens + 1), 1000),
        )
    tensors = {name: 0.02 * torch.randn(shape) for name, shape in config.shapes().items()}
    for name in [name for name in tensors if name.startswith(("cooccurrence", "token_counts"))]:
        tensors[name] = torch.arange(1, 1 + tensors[name].numel())  # a table that few candidates are in
    if kind == "dynamo":
        tensors["cooccurrence.totals"].fill_(int(tensors["cooccurrence.unigram"].sum()))
    save_heads(folder / kind, config, tensors)
    return folder / kind


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), args)
        engines = {"vllm": start(model, args, None)}
        for kind in args.kinds:
            heads = str(write_heads(Path(folder), kind, args))
            options = {"model": heads, "adaptive": False}
            engines[kind] = start(model, args, options)
            whole = options | {"draft_vocab_size": args.vocab}
            engines[f"{kind}, whole vocabulary"] = start(model, args, whole)
    drafting = [name for name in engines if name != "vllm"]
    timers = {kind: Timers() for kind in drafting}
    for kind in drafting:
        _instrument(kind, drafter_of(engines[kind]), timers[kind])
    rows = []
    for batch in args.batch:
        seconds: dict[str, list[float]] = defaultdict(list)
        parts: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in drafting}
        for llm in engines.values():
            steps(llm, batch, 4, "warm-up")
        for turn in range(args.turns):
            for kind, llm in engines.items():
                clear = timers[kind].seconds.clear if kind in timers else lambda: None
                seconds[kind] += steps(llm, batch, args.steps, f"{kind}{batch}-{turn}", clear)
                for name, value in timers[kind].seconds.items() if kind in timers else ():
                    parts[kind][name].append(value / args.steps)
        unit = statistics.median(seconds["vllm"])
        quartiles = [round(1e3 * q, 2) for q in statistics.quantiles(seconds["vllm"], n=4)[::2]]
        rows += [
            {
                "batch": batch, "method": kind, "full_pass_ms": round(1e3 * unit, 2),
                "full_pass_ms_quartiles": quartiles, "step_ms": round(1e3 * statistics.median(seconds[kind]), 2),
                "parts_in_passes": {name: round(statistics.median(v) / unit, 4) for name, v in parts[kind].items()},
            }
            for kind in drafting
        ]  # fmt: skip
    return rows


def _instrument(kind: str, drafter: Any, timers: Timers) -> None:
    timers.wrap(drafter, "draft", "drafting, whole")
    head = drafter.lm_head if drafter.vocabulary is None else drafter.vocabulary
    timers.wrap(head, "logits", "  one read of the LM head")
    if kind.startswith("cp"):
        timers.wrap(drafter, "weights", "  transforms of the experts")
        timers.wrap(drafter, "chain", "  softmax, mixtures, arg-max")
    else:
        timers.wrap(drafter, "choose", "  joint, thresholds, back-off")
        drafter.cut.branches = TimedStack(drafter.cut.branches, timers, "heads' layers in the forward")


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}, vocabulary {result['settings']['vocab']}; {result['machine']}")
    for row in result["rows"]:
        low, high = row["full_pass_ms_quartiles"]
        print(
            f"\nbatch {row['batch']}, {row['method']}: full pass {row['full_pass_ms']:.2f} ms ({low:.2f}-{high:.2f}), "
            f"a step that verifies and drafts {row['step_ms']:.2f} ms; in units of the full pass"
        )
        for name, value in row["parts_in_passes"].items():
            print(f"  {value:>7.3f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser, layers=24, hidden=1024, vocab=32_768)
    parser.add_argument("--kinds", nargs="+", default=["cp", "dynamo"], choices=["cp", "dynamo"])
    parser.add_argument("--rank", type=int, default=3, help="of the CP head")
    parser.add_argument("--drafts", type=int, default=3, help="of the CP head")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="draft vocabulary that the heads recommend")
    parser.add_argument("--tokens", type=int, default=3, help="n of DynaMo-Tn")
    report(parser, measure, show)


if __name__ == "__main__":
    main()
