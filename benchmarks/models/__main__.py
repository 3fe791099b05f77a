# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ppd.benchmarks.models COMMAND` makes the models, heads and peers that benchmarks run on."""

from __future__ import annotations

import sys
from functools import partial

from vllm_ppd.benchmarks.models import answers, corpus, inflate, peers, smollm
from vllm_ppd.benchmarks.models import train as demo
from vllm_ppd.vllm_plugins.cli.arguments import Command, Group
from vllm_ppd.vllm_plugins.cli.main import main


def peer_commands() -> dict[str, Command]:
    """A command per peer."""
    return {
        name: Command(str(options.__doc__), str(options.__doc__), partial(peers.run, recipe), options)
        for name, (options, recipe) in peers.PEERS.items()
    }


COMMANDS: dict[str, Command | Group] = {
    "corpus": Command("write the demo corpus", str(corpus.__doc__), corpus.run, corpus.CorpusOptions),
    "train": Command(
        "train the demo model", str(demo.__doc__), demo.run, demo.DemoOptions, hidden=frozenset({"model", "recipe"})
    ),
    "peer": Group("train a peer", "Train a speculator of one of vLLM's own methods for a target.", peer_commands),
    "inflate": Command("make models and heads wider", str(inflate.__doc__), inflate.run, inflate.InflateOptions),
    "unpack": Command("restore a target's answers", str(answers.__doc__), answers.unpack, answers.UnpackOptions),
    "smollm": Command("make SmolLM2-135M-Instruct", str(smollm.__doc__), smollm.run, smollm.SmolLMOptions),
}

if __name__ == "__main__":
    sys.exit(main(table=COMMANDS, prog="models"))
