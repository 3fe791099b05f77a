# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ppd.benchmarks.models COMMAND` makes the models and heads that
benchmarks run on.
"""

from __future__ import annotations

import sys

from vllm_ppd.benchmarks.models import answers, corpus, eagle, inflate, smollm
from vllm_ppd.benchmarks.models import train as demo
from vllm_ppd.vllm_plugins.cli.arguments import Command, Group
from vllm_ppd.vllm_plugins.cli.main import main

COMMANDS: dict[str, Command | Group] = {
    "corpus": Command(
        "write the demo corpus", str(corpus.__doc__), corpus.run, corpus.CorpusOptions
    ),
    "train": Command(
        "train the demo model",
        str(demo.__doc__),
        demo.run,
        demo.DemoOptions,
        hidden=frozenset({"model", "recipe"}),
    ),
    "eagle": Command(
        "train an EAGLE head", str(eagle.__doc__), eagle.run, eagle.EagleOptions
    ),
    "inflate": Command(
        "make models and heads wider",
        str(inflate.__doc__),
        inflate.run,
        inflate.InflateOptions,
    ),
    "unpack": Command(
        "restore a target's answers",
        str(answers.__doc__),
        answers.unpack,
        answers.UnpackOptions,
    ),
    "smollm": Command(
        "make SmolLM2-135M-Instruct",
        str(smollm.__doc__),
        smollm.run,
        smollm.SmolLMOptions,
    ),
}

if __name__ == "__main__":
    sys.exit(main(table=COMMANDS, prog="models"))
