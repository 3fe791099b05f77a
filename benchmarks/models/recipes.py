# SPDX-License-Identifier: Apache-2.0
"""The papers' ways of training beside each other (recipes.json): heads, losses, sizes, and base models that learn, too.

    python -m vllm_ppd.benchmarks.models recipes --model benchmarks/demo/model --data build/corpus/train.jsonl \
        --out build/recipes --steps 100 --only 't*,classifier-*'
    python -m vllm_ppd.benchmarks.models recipes --model MODEL --data build/corpus/train.jsonl --only 'cp-*' \
        --results cp_recipes.json

Each is a heads folder in --out, with its curve. A stopped run goes on where it was; finished ones are not repeated.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.results import write_rows
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.training.loop import train

RECIPES: dict[str, Any] = json.loads(Path(__file__).with_name("recipes.json").read_text())
del RECIPES["about"]
SHARED = {"model", "data", "steps", "batch_size", "sequence_length", "evaluation_tokens"}  # options of `ppd train`


class RecipesOptions(BaseModel):
    """Which recipes, on what."""

    model: str = Field(description="target")
    data: tuple[str, ...] = Field(min_length=1, description="as of ppd train")
    out: str = Field("build/recipes", description="folder of the heads folders")
    only: Annotated[tuple[str, ...], COMMAS] = Field(("*",), description=f"of {', '.join(RECIPES)}, or cp-*")
    steps: int | None = Field(None, description="optimiser steps of each (none: its epochs)")
    batch_size: int | None = Field(None, description="windows a step (none: 16, and PPD's 128 of its classifiers)")
    sequence_length: int | None = Field(None, description="tokens a window")
    evaluation_tokens: int | None = Field(None, description="held-out tokens of each evaluation")
    results: str | None = Field(None, description="JSON file for a row a recipe, with machine and settings")


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """The kind of heads of a recipe, and its options of `ppd train`."""
    recipe = RECIPES[name]
    kind, options = options_of(recipe["extends"]) if "extends" in recipe else (recipe["kind"], {})
    return kind, {**options, **recipe.get("options", {})}


def run(options: RecipesOptions) -> int:
    """Train what is not there yet, and print the held-out figures before and after.

    Raises:
        BenchError: if no recipe has such a name.
        TrainingError, Stopped: as `ppd train`.
    """
    names = [name for name in RECIPES if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    if not names:
        raise BenchError(f"--only {','.join(options.only)} names no recipe; there are {', '.join(RECIPES)}"[:300])
    shared = options.model_dump(exclude_none=True, include=SHARED)
    check_data(options.data)
    lines, rows = [], []
    with writing_folder(options.out):
        for number, name in enumerate(names, start=1):
            kind, changes = options_of(name)
            folder = Path(options.out) / name
            if not (folder / "provenance.json").is_file():
                print(f"{number} of {len(names)}: {name}", file=sys.stderr, flush=True)
                train(KINDS[kind].options(**{**changes, **shared}, out=str(folder)))
            facts = json.loads((folder / "provenance.json").read_text())
            before, after = (dict(_figures(facts[f"held_out_{when}"])) for when in ("before", "after"))
            rows.append({"recipe": name, "tokens": facts["tokens"], **after})
            for figure, value in after.items():
                start = f"{before[figure]:.4f}" if figure in before else ""
                lines.append([name, figure, start, f"{value:.4f}", f"{facts['tokens']:,}"])
    print(table(["recipe", "held out", "before", "after", "tokens"], lines))
    if options.results is not None:
        write_rows(Path(options.results), "recipes", rows, options=shared)
    return 0


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
