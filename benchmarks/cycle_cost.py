# SPDX-License-Identifier: Apache-2.0
"""What a cycle of early drafting costs beside the formula n * l/L + 1, and where the rest goes.

    python benchmarks/cycle_cost.py                       # 305M parameters, random weights, bf16, batch 1
    python benchmarks/cycle_cost.py --batch 1 4 8 --exit-layer 3 --drafts 3 --out benchmarks/results/cycle_cost.json

Two engines in one process, vLLM alone and vLLM with early drafting, take turns (A B A B); medians of single engine
steps. A cycle is one engine step: the deep pass that verifies, and the shallow loop that drafts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from engines import TimedStack, Timers, drafter_of, model_arguments, parameters, report, start, steps, write_config


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), args)
        stock = start(model, args, None)
        options = {
            "method": "ppd", "exit_layer": args.exit_layer, "num_speculative_tokens": args.drafts, "adaptive": False,
        }  # fmt: skip
        drafting = start(model, args, options)
    drafter = drafter_of(drafting)
    timers = Timers()
    first, last = drafter.cut.stacks[0], drafter.cut.stacks[-1]
    drafter.cut.stacks = [TimedStack(first, timers, "shallow layers"), TimedStack(last, timers, "deep layers")]
    timers.wrap(drafter.passes.attention, "build", "attention metadata of the shallow passes")
    timers.wrap(drafter.reader, "greedy", "norm and LM head at the exit")
    timers.wrap(drafter, "draft", "draft")
    rows = []
    for batch in args.batch:
        full: list[float] = []
        cycle: list[float] = []
        parts: dict[str, list[float]] = defaultdict(list)
        for llm in (stock, drafting):
            steps(llm, batch, 4, "warm-up")
        for turn in range(args.turns):
            full += steps(stock, batch, args.steps, f"a{batch}-{turn}")
            cycle += steps(drafting, batch, args.steps, f"b{batch}-{turn}", timers.seconds.clear)
            for name, value in timers.seconds.items():
                parts[name].append(value / args.steps)
        rows.append(row(args, batch, full, cycle, {name: statistics.median(values) for name, values in parts.items()}))
    return rows


def row(
    args: argparse.Namespace, batch: int, full: list[float], cycle: list[float], parts: dict[str, float]
) -> dict[str, Any]:
    """One batch size: medians in milliseconds and everything in units of the full pass."""
    unit = statistics.median(full)
    formula = args.drafts * args.exit_layer / args.layers + 1
    head = args.vocab * args.hidden / parameters(args)  # a read of the LM head, as a share of the weights
    with_head = args.drafts * ((1 - head) * args.exit_layer / args.layers + head) + 1
    total = statistics.median(cycle)
    # Medians of a noisy machine need not add up: the remainder is what the wrapped parts leave.
    known = parts["shallow layers"] + parts["deep layers"] + parts["norm and LM head at the exit"]
    known += parts["attention metadata of the shallow passes"]
    draft_rest = parts["draft"] - (known - parts["deep layers"])
    return {
        "batch": batch,
        "full_pass_ms": round(1e3 * unit, 2),
        "full_pass_ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(full, n=4)[::2]],
        "cycle_ms": round(1e3 * total, 2),
        "cycle_ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(cycle, n=4)[::2]],
        "cycle_in_passes": round(total / unit, 3),
        "formula": round(formula, 3),
        "formula_with_lm_head": round(with_head, 3),
        "ratio": round(total / unit / formula, 3),
        "parts_in_passes": {
            **{name: round(value / unit, 3) for name, value in parts.items() if name != "draft"},
            "rest of drafting (states, plan, host)": round(draft_rest / unit, 3),
            "rest of the step (verify, sample, schedule)": round((total - known - draft_rest) / unit, 3),
        },
    }


def show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(f"\n{result['model']}, exit {settings['exit_layer']}, n = {settings['drafts']}; {result['machine']}")
    print(
        f"{'batch':>5} {'full pass':>12} {'cycle':>12} {'cycle/pass':>11} {'formula':>8} {'ratio':>6} "
        f"{'with LM head reads':>19}"
    )
    for r in result["rows"]:
        print(
            f"{r['batch']:>5} {r['full_pass_ms']:>9.2f} ms {r['cycle_ms']:>9.2f} ms {r['cycle_in_passes']:>11.3f} "
            f"{r['formula']:>8.3f} {r['ratio']:>6.3f} {r['formula_with_lm_head']:>19.3f}"
        )
    for r in result["rows"]:
        print(f"\nbatch {r['batch']}: a cycle in units of the full pass")
        for name, value in r["parts_in_passes"].items():
            print(f"  {value:>7.3f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser, layers=12, hidden=1280, vocab=16_384)
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=3)
    report(parser, measure, show)


if __name__ == "__main__":
    main()
