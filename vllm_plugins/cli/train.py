# SPDX-License-Identifier: Apache-2.0
"""`ppd train KIND`: from a model and text to a heads folder that vLLM can serve."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.in_words import in_words
from vllm_ppd.vllm_plugins.cli.arguments import Command

if TYPE_CHECKING:
    from vllm_ppd.heads.training.options import TrainingOptions


def kinds() -> dict[str, Command]:
    """A command for each kind of heads."""
    from vllm_ppd.heads.kinds import KINDS

    texts = {kind: (config.options.__doc__ or "").strip().replace("%", "%%") for kind, config in KINDS.items()}
    return {kind: Command(text.split(": ", 1)[-1], text, run, KINDS[kind].options) for kind, text in texts.items()}


def run(options: TrainingOptions) -> int:
    check_data(options.data)  # torch takes seconds to import

    from vllm_ppd.heads.training.loop import train
    from vllm_ppd.heads.training.parallel import over_ray

    if options.ray_workers:
        over_ray(train, options)
    else:
        facts = train(options)
        if int(os.environ.get("RANK", "0")):  # torchrun and accelerate start as many of us as there are GPUs
            return 0
        _report(facts)
    print(f"wrote {options.out}: `ppd inspect {options.out}` describes it, `ppd calibrate` measures it")
    return 0


def _report(facts: dict[str, Any]) -> None:
    print(f"{facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.0f} s; held out, before -> after:")
    for name, after in facts["held_out_after"].items():
        print(f"  {name}: {in_words(facts['held_out_before'].get(name))} -> {in_words(after)}")
