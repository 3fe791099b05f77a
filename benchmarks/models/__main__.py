# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ppd.benchmarks.models COMMAND`: what makes the models, heads and peers that benchmarks run on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.models import corpus, inflate, recipes, smollm
from vllm_ppd.benchmarks.models import train as demo
from vllm_ppd.benchmarks.models.peers.draft_model import DraftModel, DraftModelOptions
from vllm_ppd.benchmarks.models.peers.eagle import Eagle, EagleOptions
from vllm_ppd.benchmarks.models.peers.medusa import Medusa, MedusaOptions
from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.training.loop import train
from vllm_ppd.vllm_plugins.cli.arguments import Command, Group
from vllm_ppd.vllm_plugins.cli.main import main

PEERS: dict[str, tuple[type[Any], type[Any]]] = {
    "eagle": (EagleOptions, Eagle),
    "medusa": (MedusaOptions, Medusa),
    "draft_model": (DraftModelOptions, DraftModel),
}


def train_peer(recipe: Any, options: Any) -> int:
    """Train a peer and write its folder."""
    check_data(options.data)
    facts = train(options, recipe)
    print(f"wrote {Path(options.out)}: {facts['tokens']:,} tokens; held out: {facts['held_out_after']}")
    return 0


def peers() -> dict[str, Command]:
    """A command a peer."""
    return {
        name: Command(str(options.__doc__), str(options.__doc__), partial(train_peer, recipe), options)
        for name, (options, recipe) in PEERS.items()
    }


COMMANDS: dict[str, Command | Group] = {
    "corpus": Command("write the demo corpus", str(corpus.__doc__), corpus.run, corpus.CorpusOptions),
    "train": Command(
        "train the demo model", str(demo.__doc__), demo.run, demo.DemoOptions, hidden=frozenset({"model", "recipe"})
    ),
    "peer": Group("train a peer", "Train a speculator of one of vLLM's own methods for a target.", peers),
    "inflate": Command("make models and heads wider", str(inflate.__doc__), inflate.run, inflate.InflateOptions),
    "recipes": Command("train the papers' recipes", str(recipes.__doc__), recipes.run, recipes.RecipesOptions),
    "smollm": Command("make SmolLM2-135M-Instruct", str(smollm.__doc__), smollm.run, smollm.SmolLMOptions),
}

if __name__ == "__main__":
    sys.exit(main(commands=COMMANDS, prog="models"))
