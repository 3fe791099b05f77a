# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ppd.benchmarks.models COMMAND` makes the models and heads that
benchmarks run on.
"""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel

from vllm_ppd.benchmarks.models import answers, corpus, eagle, inflate, smollm
from vllm_ppd.vllm_plugins.cli.arguments import Command
from vllm_ppd.vllm_plugins.cli.main import main

MODULES: dict[str, tuple[Any, str, type[BaseModel]]] = {
    "corpus": (corpus, "write the demo corpus", corpus.CorpusOptions),
    "eagle": (eagle, "train an EAGLE head", eagle.EagleOptions),
    "inflate": (inflate, "make models and heads wider", inflate.InflateOptions),
    "unpack": (answers, "restore a target's answers", answers.UnpackOptions),
    "smollm": (smollm, "make SmolLM2-135M-Instruct", smollm.SmolLMOptions),
}
COMMANDS = {
    name: Command(text, str(module.__doc__), module.run, options)
    for name, (module, text, options) in MODULES.items()
}

if __name__ == "__main__":
    sys.exit(main(table=COMMANDS, prog="models"))
