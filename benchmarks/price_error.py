# SPDX-License-Identifier: Apache-2.0
"""How far off an engine's idea of what its drafts cost is.

    python benchmarks/price_error.py --model build/inflated/model --heads build/inflated/heads/* \\
        --data build/corpus/validation.jsonl --out benchmarks/results/price_error.json
    python benchmarks/price_error.py --replay benchmarks/results/price_error.json

Engines with heads decode, --drafting steps with drafts and then PLAIN without any, and so on, whatever pays. Seconds of
these steps are kept as StepCosts is given them, and --replay runs them through the filter that it is now, with no
engine: its constants can be held against the steps of another machine.

A comparison is a run of steps without drafts beside the steps with drafts right before and after it; their median over
a cell is the price that is held to be true ("price", in units of a step without drafts). "error" is how far the filter
is from it at the end of every run, as a root mean square of logs, and "claimed" how far it holds itself to be; "apart"
is the standard deviation of single comparisons. The first FOUND comparisons of a cell count for no error.

A cell is written as soon as it is over; a further run on the same commit with the same settings adds steps to it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Contender, begun, flags, with_huge_pages
from tqdm import tqdm

from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.vllm_plugins.adaptive.drafts import REFRESH_EVERY, SETTLING, AdaptiveDrafts
from vllm_ppd.vllm_plugins.adaptive.step_costs import ENOUGH, StepCosts
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts

PLAIN = SETTLING + ENOUGH  # steps without drafts, as many as AdaptiveDrafts takes to measure one
FOUND = 2  # comparisons
Step = tuple[int, int, float]  # row of StepCosts, drafts, seconds


class Script:
    """Has an engine draft so many steps, then none for PLAIN, and so on; keeps what it measures.

    Args:
        adaptive: the engine's.
        drafting: steps with drafts, on end.
    """

    def __init__(self, adaptive: AdaptiveDrafts, drafting: int) -> None:
        self.taken: list[Step] = []
        self._adaptive, self._drafting, self._steps = adaptive, drafting, 0
        self._add = adaptive.costs.add
        adaptive._settling = SETTLING
        adaptive._choose = self._choose
        adaptive.costs.add = self._note

    def _choose(self, allowed: np.ndarray, size: int, emitting: int) -> np.ndarray:
        self._steps += 1
        return allowed if self._steps % (self._drafting + PLAIN) < self._drafting else np.zeros_like(allowed)

    def _note(self, size: int, drafts: int, seconds: float, steps: int = 1) -> None:
        self.taken.append((size, drafts, seconds))
        self._add(size, drafts, seconds, steps)


def steps_of(engine: Contender, prompts: list[list[int]], temperature: float, drafting: int, times: int) -> list[Step]:
    """What an engine measures while it drafts so many steps, and PLAIN without, so many times."""
    assert engine.adaptive is not None
    engine.adaptive.__init__(engine.adaptive.most)
    script = Script(engine.adaptive, drafting)
    engine.begin(prompts, temperature)
    for _ in range(times * (drafting + PLAIN)):
        engine.llm.llm_engine.step()
        if not engine.whole:
            engine.begin(prompts, temperature)
    return script.taken


def runs_of(steps: list[Step]) -> list[list[Step]]:
    """Those on end of one batch size and number of drafts."""
    return [list(run) for _, run in groupby(steps, key=lambda step: step[:2])]


def compared(runs: list[list[Step]]) -> Iterator[float]:
    """Log of the price, by each run without drafts between two with them."""
    for before, plain, after in zip(runs, runs[1:], runs[2:], strict=False):
        if plain[0][1] == 0 and before[0][1] == after[0][1] > 0:
            beside = [step[2] for step in before[-ENOUGH:] + after[:ENOUGH]]
            yield math.log(statistics.median(beside) / statistics.median(step[2] for step in plain))


def believed(runs: list[list[Step]], most: int) -> Iterator[tuple[float, float]]:
    """Log of the price and its standard deviation that the filter has at the end of each run, once it knows any."""
    costs, steps = StepCosts(most), 0
    for run in runs:
        for size, drafts, seconds in run:
            costs.add(size, drafts, seconds)
            steps += 1
            if steps % REFRESH_EVERY == 0 or costs.due:
                costs.refresh()
        costs.refresh()
        size, drafts = run[0][0], max(one[0][1] for one in runs)
        likely, more = costs.relative(size), costs.relative(size, 1.0)
        if likely is not None and more is not None:
            yield math.log(likely[drafts]), math.log(more[drafts] / likely[drafts])


def row(cell: str, most: int, parts: list[list[Step]]) -> dict[str, Any]:
    """What the steps of a cell come to, each run of this benchmark by itself."""
    heads, temperature, batch = cell.split("/")
    prices, errors, claimed = [], [], []
    for steps in parts:
        runs = runs_of(steps)
        found = list(compared(runs))
        price = statistics.median(found)
        beliefs = list(believed(runs, most))[2 * FOUND :]
        prices += found
        errors += [(likely - price) ** 2 for likely, _ in beliefs]
        claimed += [deviation**2 for _, deviation in beliefs]
    return {
        "heads": heads, "temperature": float(temperature), "batch": int(batch), "comparisons": len(prices),
        "price": round(math.exp(statistics.median(prices)), 3), "apart": round(statistics.stdev(prices), 3),
        "error": round(math.sqrt(statistics.mean(errors)), 3), "claimed": round(math.sqrt(statistics.mean(claimed)), 3),
    }  # fmt: skip


def rows(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a cell, and one of all."""
    found = [row(cell, one["most"], one["parts"]) for cell, one in cells.items()]
    if not found:
        return []
    together = {name: round(math.sqrt(statistics.mean(one[name] ** 2 for one in found)), 3)
                for name in ("apart", "error", "claimed")}  # fmt: skip
    whole = {"heads": "all", "temperature": "", "batch": "", "comparisons": sum(one["comparisons"] for one in found)}
    return [*found, whole | {"price": ""} | together]


def main() -> None:
    replayed = argparse.ArgumentParser(add_help=False)
    replayed.add_argument("--replay", type=Path, metavar="FILE", help="run the steps kept in it through the filter")
    if file := replayed.parse_known_args()[0].replay:  # needs no engine, and none of their flags
        show(rows(json.loads(file.read_text())["cells"]))
        return
    parser = flags(__doc__, parents=[replayed])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--drafting", type=int, default=60, help="steps with drafts, on end")
    parser.add_argument("--times", type=int, default=12, help="that drafting ends and begins, in a cell")
    parser.add_argument("--kv-cache-gib", type=float, default=0.25, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("price_error.json"))
    args = parser.parse_args()
    with_huge_pages()
    result = begun("price_error", args, apart=("times", "temperatures", "batch_sizes", "replay"))
    most = max(args.batch_sizes)
    prompts = read_prompts(tuple(args.data), str(args.model), args.prompt_tokens, most, False)
    engines = {Path(folder).name: Contender(args, most, {"model": folder}) for folder in args.heads}
    wanted = [(name, t, batch) for name in engines for t in args.temperatures for batch in args.batch_sizes]
    try:
        for name, temperature, batch in tqdm(wanted, desc="cells", mininterval=5):
            own = [prompts[i % len(prompts)] for i in range(batch)]
            steps = steps_of(engines[name], own, temperature, args.drafting, args.times)
            cell = result["cells"].setdefault(f"{name}/{temperature}/{batch}", {"parts": []})
            cell["most"] = engines[name].adaptive.most
            cell["parts"].append([(size, drafts, round(seconds, 6)) for size, drafts, seconds in steps])
            result["rows"] = rows(result["cells"])
            write_text(args.out, json.dumps(result) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; {len(result['cells'])} cells are kept in {args.out}, the same command adds to them")
    show(result["rows"])


def show(found: list[dict[str, Any]]) -> None:
    if found:
        print(table(tuple(found[0]), [list(one.values()) for one in found]))


if __name__ == "__main__":
    main()
