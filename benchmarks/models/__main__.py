# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ppd.benchmarks.models COMMAND` makes the models and heads that
benchmarks run on.
"""

import sys
from typing import Any

from pydantic import BaseModel

from vllm_ppd.benchmarks.models import eagle, inflate, smollm, texts
from vllm_ppd.vllm_plugins.cli.arguments import Command
from vllm_ppd.vllm_plugins.cli.main import main

RUNS: dict[str, tuple[Any, str, type[BaseModel]]] = {
    "corpus": (texts.write_corpus, "write the demo corpus", texts.CorpusOptions),
    "eagle": (eagle.run, "train an EAGLE-3 head", eagle.EagleOptions),
    "inflate": (
        inflate.run,
        "make models and heads wider",
        inflate.InflateOptions,
    ),
    "unpack": (texts.unpack, "restore a target's answers", texts.UnpackOptions),
    "smollm": (smollm.run, "make SmolLM2-135M-Instruct", smollm.SmolLMOptions),
}
COMMANDS = {
    name: Command(text, str(sys.modules[run.__module__].__doc__), run, options)
    for name, (run, text, options) in RUNS.items()
}

if __name__ == "__main__":
    sys.exit(main(table=COMMANDS, prog="models"))
