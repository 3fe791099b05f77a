# SPDX-License-Identifier: Apache-2.0
"""Whether heads are ever slower than vLLM alone, on a machine that is not equally fast from one second to the next.

    python benchmarks/demo/corpus.py --out build/corpus
    python benchmarks/inflate.py --model benchmarks/demo/model --parameters 100M --out build/inflated \\
        --heads benchmarks/demo/heads/early benchmarks/demo/heads/cp benchmarks/demo/heads/dynamo
    python benchmarks/never_slower.py --model build/inflated/model --heads build/inflated/heads/* \\
        --data build/corpus/validation.jsonl --out benchmarks/results/never_slower.json

`ppd bench decode` lets whole batches decode in turn, which takes seconds each. Here engines of one process decode the
same requests side by side, and a turn is a few steps: A B C, C B A, then B C A, A C B, and so on, so that nobody always
follows itself. Heads draft as a server would let them (adaptive), trials included; what they learn in the first
--warm-up steps of a cell is not counted. A ratio is tokens a second over those of two engines of vLLM alone together,
in the same pair of turns; "overall" is that of all tokens and seconds of a cell, "drafting" the share of steps with
drafts. The last rows are of all cells: the geometric mean, median and quartiles of "overall".

Weights lie in huge pages where the system has them: else the same product takes up to a fifth longer in one engine than
in another, by the pages that each happened to get.

A cell is written as soon as it is over; a further run on the same commit with the same settings adds pairs to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from engines import add_up, drafter_of
from tqdm import tqdm

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts
from vllm_ppd.vllm_plugins.bench.results import quartiles

BASE, CONTROL = "vLLM", "vLLM, again"
MOST_TOKENS = 600  # of a request, before the batch begins anew
HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's own
    # What vLLM packs: memory of its own for each matrix, and none that was another's before.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000",
}
Pair = tuple[int, float, int]  # tokens, seconds and steps with drafts of two turns


class Contender:
    """An engine and the requests that it decodes."""

    def __init__(self, args: argparse.Namespace, heads: str | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(args.model), dtype=args.dtype, seed=0, max_num_seqs=max(args.batch_sizes),
            max_model_len=args.prompt_tokens + MOST_TOKENS + 16, enable_prefix_caching=False,
            kv_cache_memory_bytes=int(args.kv_cache_gib * (1 << 30)),
            speculative_config=None if heads is None else {"model": heads},
        )  # fmt: skip
        self.adaptive = None if heads is None else drafter_of(self.llm).planner.adaptive
        self.names: list[str] = []
        self.begun = 0

    def begin(self, prompts: list[list[int]], temperature: float) -> None:
        """Leave what is decoded, and take these prompts in."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        if self.names:
            engine.abort_request(self.names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        params = SamplingParams(
            temperature=temperature, max_tokens=MOST_TOKENS, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.begun += 1
        self.names = [
            engine.add_request(f"{self.begun}-{i}", {"prompt_token_ids": ids}, params) for i, ids in enumerate(prompts)
        ]
        seen: set[str] = set()
        while len(seen) < len(prompts):  # until all have a token
            seen |= {output.request_id for output in engine.step()}

    @property
    def whole(self) -> bool:
        """Whether all of the batch still decode."""
        return self.llm.llm_engine.get_num_unfinished_requests() == len(self.names)

    def turn(self, steps: int) -> Pair:
        """Some steps, after one that finds its weights in no cache."""
        if self.adaptive is not None:
            self.adaptive.interrupted()
        engine = self.llm.llm_engine
        engine.step()
        started, tokens, drafting = time.perf_counter(), 0, 0
        for _ in range(steps):
            drafting += self.adaptive is not None and self.adaptive.drafting
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return tokens, time.perf_counter() - started, drafting


def measure(args: argparse.Namespace, engines: dict[str, Contender], prompts: list[list[int]],
            temperature: float, progress: Any) -> dict[str, list[Pair]]:  # fmt: skip
    """Pairs of turns of every contender at one temperature and batch size."""
    found: dict[str, list[Pair]] = {name: [] for name in engines}
    for one in engines.values():
        one.begin(prompts, temperature)
        for _ in range(args.warm_up // args.steps):
            one.turn(args.steps)
            if not one.whole:
                one.begin(prompts, temperature)
    while len(found[BASE]) < args.pairs:
        if not all(one.whole for one in engines.values()):
            for one in engines.values():
                one.begin(prompts, temperature)
        turns: dict[str, list[Pair]] = {name: [] for name in engines}
        first = len(found[BASE]) % len(engines)
        order = [*list(engines)[first:], *list(engines)[:first]]
        for name in [*order, *reversed(order)]:
            turns[name].append(engines[name].turn(args.steps))
        if all(one.whole for one in engines.values()):
            for name, (one, other) in turns.items():
                found[name].append((one[0] + other[0], one[1] + other[1], one[2] + other[2]))
        progress.update()
    return found


def rows(cells: dict[str, dict[str, list[Pair]]], steps: int) -> list[dict[str, Any]]:
    """The table of turns of so many steps: a row a cell and contender, and then one a contender for all cells."""
    result: list[dict[str, Any]] = []
    for cell, pairs in cells.items():
        temperature, batch = cell.split("/")
        base = np.sum([pairs[BASE], pairs[CONTROL]], axis=0)[:, :2]  # [pairs, (tokens, seconds)]
        for name, found in pairs.items():
            own = np.array(found)
            tokens, seconds, drafting = own.sum(axis=0)
            middle, low, high = quartiles(list(own[:, 0] / own[:, 1] / (base[:, 0] / base[:, 1])))
            result.append({
                "temperature": float(temperature), "batch": int(batch), "contender": name, "pairs": len(own),
                "overall": round(tokens / seconds / np.divide(*base.sum(axis=0)), 3), "median": round(middle, 3),
                "quartiles": f"{low:.3f}-{high:.3f}", "tokens a second": round(tokens / seconds, 1),
                "drafting": round(drafting / (2 * steps * len(own)), 2),
            })  # fmt: skip
    for name in dict.fromkeys(row["contender"] for row in result):
        own_rows = [row for row in result if row["contender"] == name]
        overall = [row["overall"] for row in own_rows]
        middle, low, high = quartiles(overall)
        result.append({
            "temperature": "all", "batch": "all", "contender": name, "pairs": sum(row["pairs"] for row in own_rows),
            "overall": round(statistics.geometric_mean(overall), 3), "median": round(middle, 3),
            "quartiles": f"{low:.3f}-{high:.3f}", "tokens a second": "",
            "drafting": round(statistics.mean(row["drafting"] for row in own_rows), 2),
        })  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="heads folders, a contender each")
    parser.add_argument("--data", nargs="+", required=True, help="prompts, as ppd bench decode takes them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--pairs", type=int, default=12, help="of turns, at each temperature and batch size")
    parser.add_argument("--warm-up", type=int, default=256, help="steps before the first turn of a cell")
    parser.add_argument("--kv-cache-gib", type=float, default=0.6, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("never_slower.json"))
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in HUGE_PAGES.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})
    result = provenance(
        benchmark="never_slower", model=str(args.model),
        settings={name: str(value) for name, value in vars(args).items()
                  if name not in ("out", "pairs", "temperatures", "batch_sizes")},
        cells={}, rows=[],
    )  # fmt: skip
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        if add_up(earlier, result):
            result["cells"] = earlier["cells"]
        else:
            sys.exit(f"{args.out} is of another commit, machine or other settings; give another --out, or remove it")
    all_prompts = read_prompts(tuple(args.data), str(args.model), args.prompt_tokens, max(args.batch_sizes), False)
    engines = {BASE: Contender(args, None), CONTROL: Contender(args, None)}
    engines |= {Path(heads).name: Contender(args, heads) for heads in args.heads}
    total = args.pairs * len(args.temperatures) * len(args.batch_sizes)
    try:
        with tqdm(total=total, desc="pairs", mininterval=5) as progress:
            for temperature in args.temperatures:
                for batch in args.batch_sizes:
                    prompts = [all_prompts[i % len(all_prompts)] for i in range(batch)]
                    found = measure(args, engines, prompts, temperature, progress)
                    cell = result["cells"].setdefault(f"{temperature}/{batch}", {})
                    for name, pairs in found.items():
                        cell[name] = [*cell.get(name, []), *pairs]
                    result["rows"] = rows(result["cells"], args.steps)
                    write_text(args.out, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; {len(result['cells'])} cells are kept in {args.out}, the same command adds to them")
    for row in result["rows"]:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
