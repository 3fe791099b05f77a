# SPDX-License-Identifier: Apache-2.0
"""The papers' ways of training beside each other (recipes.json): heads, losses, sizes, and base models that learn, too.

    python -m vllm_ppd.benchmarks.models recipes --model benchmarks/demo/model --data build/corpus/train.jsonl \
        --out build/recipes --steps 100 --only 't*,classifier-*'

Each is a heads folder in --out, with its curve and its held-out figures in provenance.json. A stopped run goes on where
it was; finished ones are not repeated.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.heads.data.check import check_data
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


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """The kind of heads of a recipe, and its options of `ppd train`."""
    recipe = RECIPES[name]
    kind, options = options_of(recipe["extends"]) if "extends" in recipe else (recipe["kind"], {})
    return kind, {**options, **recipe.get("options", {})}


def run(options: RecipesOptions) -> int:
    """Train what is not there yet, and print the held-out figures of each.

    Raises:
        BenchError: if no recipe has such a name.
        TrainingError, Stopped: as `ppd train`.
    """
    names = [name for name in RECIPES if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    if not names:
        raise BenchError(f"--only {','.join(options.only)} names no recipe; there are {', '.join(RECIPES)}"[:300])
    shared = options.model_dump(exclude_none=True, include=SHARED)
    check_data(options.data)
    with writing_folder(options.out):
        for number, name in enumerate(names, start=1):
            kind, changes = options_of(name)
            folder = Path(options.out) / name
            if not (folder / "provenance.json").is_file():
                print(f"{number} of {len(names)}: {name}", file=sys.stderr, flush=True)
                train(KINDS[kind].options(**{**changes, **shared}, out=str(folder)))
            facts = json.loads((folder / "provenance.json").read_text())
            print(f"{name}, {facts['tokens']:,} tokens: {json.dumps(facts['held_out_after'])}", flush=True)
    return 0
