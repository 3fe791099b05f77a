# SPDX-License-Identifier: Apache-2.0
"""The papers' ways of training beside each other on one model: PPD's classifiers, DynaMo's recipes and sizes.

    python -m vllm_ppd.benchmarks.models.recipes --model benchmarks/demo/model --data build/corpus/train.jsonl \
        --out build/recipes --steps 100

Each is a heads folder below --out, with its curve. A stopped run goes on where it was; finished ones are not repeated.
`ppd calibrate` measures any of them further.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.registry import HEADS
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.loop import train

# The papers' loss; our default is the target's own distribution (t3-distilled).
T3: dict[str, Any] = {"tokens": 3, "num_speculative_tokens": 2, "distillation": 0.0}
FULL = {**T3, "recipe": "full", "start": "random", "precision": "float32"}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "transform-kl": ("early", {}),  # ParaDecode, section 2.1
    "classifier-ce": ("early", {"head": "classifier", "loss": "ce"}),  # PPD, Table 4: the "Y" rows
    "t2": ("dynamo", {**T3, "tokens": 2, "num_speculative_tokens": 1}),
    "t3": ("dynamo", T3),  # heads alone, as DynaMo's Table 10 has "-H"
    "t3-distilled": ("dynamo", {**T3, "distillation": 1.0}),
    "t4": ("dynamo", {**T3, "tokens": 4, "num_speculative_tokens": 3}),
    "t3-random": ("dynamo", {**T3, "start": "random"}),
    "t3-full": ("dynamo", FULL),  # DynaMo, A.1: three rates
    # The base model as plain CLM training moves it, as Pythia+ of Table 10; its heads follow it.
    "t3-continued": ("dynamo", {**FULL, "stem_learning_rate": 0.0}),
}


def run(names: Sequence[str], out: Path, **shared: Any) -> str:
    """Train what is not there yet and compare the held-out figures.

    Args:
        names: of RECIPES.
        out: folder of the heads folders.
        shared: options of `ppd train` that all take, over their own.

    Returns:
        A Markdown table.

    Raises:
        TrainingError: as `ppd train`.
    """
    rows = []
    for name in names:
        kind, own = RECIPES[name]
        folder = out / name
        if not (folder / "provenance.json").is_file():
            train(HEADS[kind].options(**{**own, **shared}, out=str(folder)))
        facts = json.loads((folder / "provenance.json").read_text())
        before, after = (dict(_figures(facts[f"held_out_{when}"])) for when in ("before", "after"))
        rows += [
            [name, figure, f"{before[figure]:.4f}", f"{value:.4f}", f"{facts['tokens']:,}"]
            for figure, value in after.items()
        ]
    return table(["recipe", "held out", "before", "after", "tokens"], rows)


def _figures(held_out: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in held_out.items():
        if isinstance(value, dict):
            yield from ((f"{name}, {measure}", number) for measure, number in value.items())
        else:
            yield name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("build/recipes"))
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--steps", type=int, help="optimiser steps of each (default: its epochs)")
    parser.add_argument("--batch-size", type=int, help="windows a step (default: 16, and PPD's 128 of its classifiers)")
    args = parser.parse_args()
    shared = {"steps": args.steps, "batch_size": args.batch_size}
    given = {name: value for name, value in shared.items() if value is not None}
    try:
        print(run(args.only, args.out, model=args.model, data=tuple(args.data), **given))
    except TrainingError as error:
        sys.exit(f"recipes: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on there")


if __name__ == "__main__":
    main()
