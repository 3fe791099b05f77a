# SPDX-License-Identifier: Apache-2.0
"""The papers' ways of training beside each other: PPD's classifiers, DynaMo's recipes and sizes, CP heads with a base.

    python -m vllm_ppd.benchmarks.models.recipes --model benchmarks/demo/model --data build/corpus/train.jsonl \
        --out build/recipes --steps 100 --only 't*' 'classifier-*'
    python -m vllm_ppd.benchmarks.models.recipes --model MODEL --data build/corpus/train.jsonl --only 'cp-*' \
        --texts build/corpus/validation.jsonl --json cp_recipes.json

Each is a heads folder below --out, with its curve. A stopped run goes on where it was; finished ones are not repeated.
`ppd calibrate` measures any of them further. Those named cp-scratch take of MODEL its shape and tokenizer alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.kinds import KINDS, calibration_of
from vllm_ppd.heads.training.loop import train
from vllm_ppd.heads.training.provenance import provenance

# The papers' loss; our default is the target's own distribution (t3-distilled).
T3: dict[str, Any] = {"tokens": 3, "num_speculative_tokens": 2, "distillation": 0.0}
FULL = {**T3, "recipe": "full", "start": "random", "precision": "float32"}
# CP, section 3.1: the base model learns with the head.
CP = {"recipe": "full", "start": "identity", "condition": "none", "distillation": 0.0, "precision": "float32"}
SCRATCH = {**CP, "base_start": "random", "base_learning_rate": 3e-3}
RANKS = (1, 3, 5, 8)
BALANCES = (0.0, 0.01, 1.0, 10.0)  # beside the default of 0.1, at the highest rank
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
    **{
        f"cp-{base}-{rank}{form}": ("cp", {**options, "rank": rank, "factorised": not form})
        for base, options in (("scratch", SCRATCH), ("joint", CP)) for form in ("", "-whole") for rank in RANKS
    },
    **{f"cp-scratch-8-balance-{weight:g}": ("cp", {**SCRATCH, "rank": 8, "balance": weight}) for weight in BALANCES},
}  # fmt: skip


class Trained(NamedTuple):
    """One recipe's heads."""

    name: str
    tokens: int
    before: dict[str, float]  # held-out figures
    after: dict[str, float]


def trained(
    names: Sequence[str], out: Path, texts: str | None = None, prompts: int = 64, **shared: Any
) -> Iterator[Trained]:
    """Train what is not there yet.

    Args:
        names: of RECIPES.
        out: folder of the heads folders.
        texts: of CP heads, which read the final states alone, tell the drafts accepted on what the target writes after
            these texts (None: do not).
        prompts: how many of these texts.
        shared: options of `ppd train` that all take, over their own.

    Raises:
        TrainingError: as `ppd train`.
        Stopped: as `ppd train`.
    """
    for number, name in enumerate(names, start=1):
        kind, own = RECIPES[name]
        folder = out / name
        if not (folder / "provenance.json").is_file():
            print(f"{number} of {len(names)}: {name}", file=sys.stderr, flush=True)
            train(KINDS[kind].options(**{**own, **shared}, out=str(folder)))
        facts = json.loads((folder / "provenance.json").read_text())
        before, after = (dict(_figures(facts[f"held_out_{when}"])) for when in ("before", "after"))
        if texts and kind == "cp":
            after |= _accepted(folder, texts, prompts)
        yield Trained(name, facts["tokens"], before, after)


def run(found: Iterable[Trained]) -> str:
    """A Markdown table of the held-out figures before and after."""
    rows = [
        [one.name, figure, _shown(one.before.get(figure)), _shown(value), f"{one.tokens:,}"]
        for one in found for figure, value in one.after.items()
    ]  # fmt: skip
    return table(["recipe", "held out", "before", "after", "tokens"], rows)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _figures(held_out: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in held_out.items():
        if name in ("joint_nats_a_token", "first_position"):
            continue
        if isinstance(value, dict):
            yield from ((f"{name}, {measure}", number) for measure, number in value.items())
        elif name == "share_of_experts":
            yield "largest share of an expert", max(value)
        elif isinstance(value, list):
            yield from ((f"{name}, {place}", number) for place, number in enumerate(value, start=1))
        else:
            yield name, value


def _accepted(folder: Path, texts: str, prompts: int) -> dict[str, float]:
    """Drafts accepted a step, greedy and at the temperature of the loss; kept beside the heads."""
    path = folder / "accepted.json"
    if not path.exists():
        options = CalibrationOptions.model_validate(
            {"heads": str(folder), "data": (texts,), "prompts": prompts, "new_tokens": 64, "temperature": 1.0}
        )
        found = calibration_of("cp").PARTS["acceptance"](Calibration(options))
        accepted = {f"accepted, {way}": round(by["by_drafts"][-1]["length"] - 1, 4) for way, by in found.items()}
        write_text(path, json.dumps(accepted) + "\n")
    kept: dict[str, float] = json.loads(path.read_text())
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("build/recipes"))
    parser.add_argument("--only", nargs="+", default=["*"], metavar="RECIPE", help=f"of {', '.join(RECIPES)}, or cp-*")
    parser.add_argument("--steps", type=int, help="optimiser steps of each (default: its epochs)")
    parser.add_argument("--batch-size", type=int, help="windows a step (default: 16, and PPD's 128 of its classifiers)")
    parser.add_argument("--sequence-length", type=int, help="tokens a window")
    parser.add_argument("--evaluation-tokens", type=int, help="held-out tokens of each evaluation")
    parser.add_argument("--texts", help="held-out texts: tells the drafts that CP heads' own targets accept after them")
    parser.add_argument("--prompts", type=int, default=64, help="how many of these texts")
    parser.add_argument("--json", type=Path, help="file for one row a recipe, with machine and settings")
    args = parser.parse_args()
    names = [name for name in RECIPES if any(fnmatch.fnmatch(name, pattern) for pattern in args.only)]
    if not names:
        sys.exit(f"recipes: --only {' '.join(args.only)} names no recipe; there are {', '.join(RECIPES)}"[:300])
    shared = ("steps", "batch_size", "sequence_length", "evaluation_tokens", "model")
    given = {name: value for name, value in vars(args).items() if name in shared and value is not None}
    given["data"] = tuple(args.data)
    try:
        with only_writer(args.out):
            found = list(trained(names, args.out, args.texts, args.prompts, **given))
        print(run(found))
        if args.json is not None:
            rows = [{"recipe": one.name, "tokens": one.tokens, **one.after} for one in found]
            write_text(args.json, json.dumps(provenance(rows=rows, options=given), indent=1) + "\n")
    except TrainingError as error:
        sys.exit(f"recipes: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on there")


if __name__ == "__main__":
    main()
