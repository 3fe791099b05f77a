# SPDX-License-Identifier: Apache-2.0
"""Whether heads are ever slower than vLLM alone, on a machine that is not equally fast from one second to the next.

    python benchmarks/demo/corpus.py --out build/corpus
    python benchmarks/inflate.py --model benchmarks/demo/model --parameters 100M --out build/inflated \\
        --heads benchmarks/demo/heads/early benchmarks/demo/heads/cp benchmarks/demo/heads/dynamo
    python benchmarks/never_slower.py --model build/inflated/model --heads build/inflated/heads/* \\
        --data build/corpus/validation.jsonl --out benchmarks/results/never_slower.json

Engines decode the same requests in turns of a few steps (side_by_side.py). Heads draft as a server would let them
(adaptive), trials included; what they learn in the first --warm-up steps of a cell is not counted. A ratio is tokens
over those that vLLM alone gives in the same seconds, at its speed in the turns right before and after (engines of vLLM
alone are held against all of them in the same pair of turns). "overall" is that of all pairs of a cell, with the
interval in which it lies at 90 % (bootstrap over pairs), "median" and "quartiles" those of single pairs, "drafting" the
share of steps with drafts. The last rows are of several cells, those of a batch size, those of a temperature, and all:
the geometric mean of "overall" with its interval, and median and quartiles over cells.

A cell is written as soon as it is over; a further run on the same commit with the same settings adds pairs to it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import (
    ALL,
    RESAMPLES,
    Contender,
    Pair,
    add_pairs,
    begun,
    between,
    flags,
    in_turns,
    interval,
    joined,
    mean_ratio,
    plain_names,
    started,
    with_huge_pages,
)
from tqdm import tqdm

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts
from vllm_ppd.vllm_plugins.bench.results import quartiles


def rows(cells: dict[str, dict[str, list[Pair]]], steps: int) -> list[dict[str, Any]]:
    """The table of turns of so many steps: a row a cell and contender, and then those of several cells."""
    result: list[dict[str, Any]] = []
    of_cell: dict[tuple[str, str], tuple[dict[str, Any], np.ndarray]] = {}
    generator = np.random.default_rng(0)  # one for all: cells that drew the same pairs would vary together
    for cell, pairs in cells.items():
        temperature, batch = cell.split("/")
        for name, found in pairs.items():
            tokens, seconds, drafting, plain_tokens, plain_seconds = np.array(found).T
            expected = seconds * plain_tokens / plain_seconds  # tokens of vLLM alone in the same seconds
            samples = resampled(tokens, expected, generator)
            middle, low, high = quartiles((tokens / expected).tolist())
            result.append({
                "temperature": float(temperature), "batch": int(batch), "contender": name, "pairs": len(tokens),
                "overall": round(float(tokens.sum() / expected.sum()), 3), "interval": interval(samples),
                "median": round(middle, 3), "quartiles": f"{low:.3f}-{high:.3f}",
                "tokens a second": round(float(tokens.sum() / seconds.sum()), 1),
                "drafting": round(float(drafting.sum()) / (2 * steps * len(tokens)), 2),
            })  # fmt: skip
            of_cell[cell, name] = result[-1], samples
    for temperature, batch, several in joined(list(cells)):
        for name in cells[several[0]]:
            own_rows, samples = zip(*(of_cell[cell, name] for cell in several), strict=True)
            ratios = [row["overall"] for row in own_rows]
            overall, lies = mean_ratio(ratios, list(samples))
            middle, low, high = quartiles(ratios)
            result.append({
                "temperature": temperature, "batch": batch if batch == ALL else int(batch), "contender": name,
                "pairs": sum(row["pairs"] for row in own_rows), "overall": overall, "interval": lies,
                "median": round(middle, 3), "quartiles": f"{low:.3f}-{high:.3f}", "tokens a second": "",
                "drafting": round(statistics.mean(row["drafting"] for row in own_rows), 2),
            })  # fmt: skip
    return result


def resampled(tokens: np.ndarray, expected: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Ratios of sums over pairs, with pairs drawn anew each time: [RESAMPLES]."""
    chosen = generator.integers(len(tokens), size=(RESAMPLES, len(tokens)))
    ratios: np.ndarray = tokens[chosen].sum(axis=1) / expected[chosen].sum(axis=1)
    return ratios


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=12, help="of turns, at each temperature and batch size")
    parser.add_argument("--warm-up", type=int, default=256, help="steps before the first turn of a cell")
    parser.add_argument("--kv-cache-gib", type=float, default=0.6, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("never_slower.json"))
    args = parser.parse_args()
    with_huge_pages()
    result = begun("never_slower", args, apart=("pairs", "temperatures", "batch_sizes"))
    all_prompts = read_prompts(tuple(args.data), str(args.model), args.prompt_tokens, max(args.batch_sizes), False)
    most = max(args.batch_sizes)
    plain, heads = plain_names(len(args.heads)), {Path(folder).name: {"model": folder} for folder in args.heads}
    engines = started(
        [*plain, *heads], between(list(heads), list(plain), 0), lambda name: Contender(args, most, heads.get(name))
    )
    total = args.pairs * len(args.temperatures) * len(args.batch_sizes)
    try:
        with tqdm(total=total, desc="pairs", mininterval=5) as progress:
            for temperature in args.temperatures:
                for batch in args.batch_sizes:
                    prompts = [all_prompts[i % len(all_prompts)] for i in range(batch)]
                    found = in_turns(engines, dict.fromkeys(engines, prompts), temperature, args.pairs, args.steps,
                                     args.warm_up, progress, args.most_stolen)  # fmt: skip
                    add_pairs(result, f"{temperature}/{batch}", found)
                    result["rows"] = rows(result["cells"], args.steps)
                    write_text(args.out, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; {len(result['cells'])} cells are kept in {args.out}, the same command adds to them")
    for row in result["rows"]:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
