# SPDX-License-Identifier: Apache-2.0
"""What steps with drafts cost at batch 1, against what `ppd plan` predicts of them.

    ppd calibrate build/inflated/heads/early --data build/corpus/validation.jsonl      # and the other heads
    python benchmarks/step_prediction.py --model build/inflated/model --heads build/inflated/heads/* \\
        --data build/corpus/validation.jsonl --out benchmarks/results/step_prediction.json

Engines that always draft as many tokens as their heads recommend decode one text after another beside vLLM alone, in
turns of a few steps (side_by_side.py). Another engine of vLLM alone decodes ROWS requests: with its steps at 1 and at
ROWS the prediction needs no other time of this machine. Drafts are accepted as the heads' own calibration says, on
greedy or sampled texts as these are.

"length" is tokens a step where texts are equally long, as requests are and as the calibration counts; turns have
equally many steps, of which a text that accepts much makes more tokens. "step" is in units of vLLM's own step at batch
1, the median over pairs of turns, and "measured" is "length" over it. "at the measured length" is the speed-up held
against the formula of the step alone, as if these few texts had been predicted to accept what they did.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from prediction import ways_of
from side_by_side import BASE, Contender, Pair, add_pairs, begun, flags, in_turns, plain_names, with_huge_pages
from tqdm import tqdm

from vllm_ppd.heads.calibration.stored import calibration_of
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.checkpoint import HeadsError, load_config, write_text
from vllm_ppd.heads.planning.machine import Served
from vllm_ppd.heads.planning.predict import Drafting
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts
from vllm_ppd.vllm_plugins.bench.results import quartiles

ROWS = 4  # most tokens of a request that a step verifies, the one before the drafts among them
SEVERAL = "vLLM, several requests"  # so many


def predicted(heads: str, model: str, temperature: float, steps: dict[str, float]) -> Drafting:
    """The calibrated setting that always drafts what the heads recommend, on a machine of these steps.

    Raises:
        HeadsError: if the heads were not calibrated.
    """
    config = load_config(heads)
    options = {"temperature": temperature, "model": model}
    way = max(ways_of({"model": heads, "adaptive": False}, config, options), key=lambda way: way.speedup(1))
    share = calibration_of(heads)["parts"]["timing"]["lm_head_share"]
    return dataclasses.replace(way, machine=Served(steps, way.num_layers, share))


def step_seconds(pairs: list[Pair], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """[pairs] of a step of the contender, in turns of so many, and of vLLM alone at batch 1 beside it."""
    _, seconds, _, plain_tokens, plain_seconds = np.array(pairs).T
    return seconds / (2 * steps), plain_seconds / plain_tokens


def even_length(pairs: list[Pair], steps: int, of_text: int) -> float:
    """Tokens a step where texts are equally long: a text of which much is accepted takes fewer steps, not more tokens.

    Args:
        pairs: of turns of so many steps, in the order of the texts.
        of_text: pairs of each text.
    """
    tokens = np.array(pairs)[:, 0]
    of_texts = tokens[: len(tokens) // of_text * of_text].reshape(-1, of_text).sum(axis=1)
    return float(1 / np.mean(2 * steps * of_text / of_texts))


def row(name: str, way: Drafting, pairs: dict[str, list[Pair]], steps: int, of_text: int) -> dict[str, Any]:
    """What a contender's pairs of turns of so many steps came to, so many pairs of each text."""
    own = np.array(pairs[name])
    seconds, plain = step_seconds(pairs[name], steps)
    step, low, high = quartiles((seconds / plain).tolist())
    length = even_length(pairs[name], steps, of_text)
    formula = way.seconds(1) / way.plain(1)
    return {
        "contender": name, "pairs": len(own), "drafts": way.options["num_speculative_tokens"],
        "length": round(length, 3), "predicted length": round(way.length, 3),
        "step": round(step, 3), "quartiles": f"{low:.3f}-{high:.3f}", "predicted step": round(formula, 3),
        "measured": round(length / step, 3), "predicted": round(way.speedup(1), 3),
        "measured / predicted": round(length / step / way.speedup(1), 3),
        "at the measured length": round(formula / step, 3),
    }  # fmt: skip


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--texts", type=int, default=16, help="at each temperature; a further run takes further ones")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="as of the calibration")
    parser.add_argument("--pairs", type=int, default=2, help="of turns, of each text")
    parser.add_argument("--kv-cache-gib", type=float, default=0.25, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("step_prediction.json"))
    args = parser.parse_args()
    with_huge_pages()
    result = begun("step_prediction", args, apart=("texts", "temperatures"))
    try:
        for heads in args.heads:
            calibration_of(heads)  # refused now, not after minutes of starting
    except HeadsError as error:
        sys.exit(str(error))
    seen = {t: len(result["cells"].get(str(t), {BASE: []})[BASE]) // args.pairs for t in args.temperatures}
    wanted = max(seen.values()) + args.texts
    texts = read_prompts(tuple(args.data), str(args.model), args.prompt_tokens, wanted, False)
    engines = {name: Contender(args, 1) for name in plain_names(len(args.heads) + 1)} | {SEVERAL: Contender(args, ROWS)}
    engines |= {Path(heads).name: Contender(args, 1, {"model": heads, "adaptive": False}) for heads in args.heads}
    try:
        with tqdm(total=args.pairs * args.texts * len(args.temperatures), desc="pairs", mininterval=5) as progress:
            for temperature in args.temperatures:
                for number in range(seen[temperature], seen[temperature] + args.texts):
                    text = texts[number % len(texts)]
                    prompts = {name: [text] * (ROWS if name == SEVERAL else 1) for name in engines}
                    found = in_turns(engines, prompts, temperature, args.pairs, args.steps, 0, progress,
                                     args.most_stolen)  # fmt: skip
                    add_pairs(result, str(temperature), found)
                    result["rows"] = rows(result["cells"], args.heads, str(args.model), args.steps, args.pairs)
                    write_text(args.out, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; what was measured is kept in {args.out}, the same command adds to it")
    if shown := result["rows"]:
        print(table(tuple(shown[0]), [list(one.values()) for one in shown]))


def rows(
    cells: dict[str, dict[str, list[Pair]]], heads: list[str], model: str, steps: int, of_text: int
) -> list[dict[str, Any]]:
    """A row a temperature and heads folder."""
    found = []
    for temperature, pairs in cells.items():
        several, one = step_seconds(pairs[SEVERAL], steps)
        # A ratio of the same seconds: the machine is as fast as it is in both.
        seconds = {"1": float(np.median(one)), str(ROWS): float(np.median(one) * np.median(several / one))}
        for folder in heads:
            way = predicted(folder, model, float(temperature), seconds)
            found.append({"temperature": float(temperature), **row(Path(folder).name, way, pairs, steps, of_text)})
    return found


if __name__ == "__main__":
    main()
