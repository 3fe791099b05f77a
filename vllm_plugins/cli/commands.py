# SPDX-License-Identifier: Apache-2.0
"""The commands `ppd fit`, `ppd data`, `ppd train`, `ppd calibrate` and `ppd bench`.

Each takes its options and returns the exit code. torch and transformers take seconds to
import, so data is checked first.
"""

from __future__ import annotations

import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.data.records import check_data
from vllm_ppd.heads.text import in_words
from vllm_ppd.vllm_plugins.cli.arguments import Command

if TYPE_CHECKING:
    from vllm_ppd.heads.options import (
        CalibrationOptions,
        DataOptions,
        FitOptions,
        TrainingOptions,
    )


def kinds() -> dict[str, Command]:
    """A command of `ppd train` for each kind of heads."""
    from vllm_ppd.heads.kinds import KINDS

    commands = {}
    for kind, config in KINDS.items():
        text = (config.options.__doc__ or "").strip()
        commands[kind] = Command(
            text.split(": ", 1)[-1], text, train, config.options
        )
    return commands


def fit(options: FitOptions) -> int:
    """Write data, then train and calibrate heads."""
    check_data(options.prompts)
    from vllm_ppd.vllm_plugins.cli.fit import run

    return run(options)


def benchmarks() -> dict[str, Command]:
    """The commands of `ppd bench`."""
    return {
        "decode": Command(
            "speed and accepted drafts of offline decoding",
            "Decode batches with vLLM alone, with heads, and with vLLM's own "
            "speculative methods, in turns.",
            decode,
            "benchmarks.systems:DecodeOptions",
        ),
    }


def data(options: DataOptions) -> int:
    """Let the target write chats."""
    check_data(options.prompts)
    from vllm_ppd.heads.generation import write_chats
    from vllm_ppd.vllm_plugins.cli.fit import vllm_engine

    file = write_chats(options, vllm_engine)
    print(
        f"{options.out}: {file.count:,} chats, {file.tokens:,} tokens with their "
        "prompts"
    )
    return 0


def train(options: TrainingOptions) -> int:
    """Train heads for a model on text, and write a heads folder that vLLM can serve."""
    check_data(options.data)
    from vllm_ppd.heads.training import loop

    facts = loop.train(options)
    if int(
        os.environ.get("RANK", "0")
    ):  # torchrun and accelerate start a process per GPU
        return 0
    trained = f"{facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.0f} s"
    best = facts["held_out_after_step"]
    kept = (
        ""
        if best == facts["steps"]
        else f" (the heads of step {best}, which are the best)"
    )
    print(f"{trained}; held out, before -> after{kept}:")
    for name, after in facts["held_out_after"].items():
        print(
            f"  {name}: {in_words(facts['held_out_before'].get(name))} -> "
            f"{in_words(after)}"
        )
    print(f"wrote {options.out}: `ppd calibrate {options.out}` measures it")
    return 0


def calibrate(options: CalibrationOptions) -> int:
    """Measure a heads folder, and print what was measured and how to serve."""
    check_data(options.data)
    from vllm_ppd.heads.calibration import run
    from vllm_ppd.heads.folder import CALIBRATION_NAME

    print(run.report(run.calibrate(options), options.heads))
    print(f"\nwrote {options.heads}/{CALIBRATION_NAME}")
    return 0


def decode(options: Any) -> int:
    """Measure speeds, and print the tables."""
    # Benchmarks import this package
    print(resolve_name("vllm_ppd.benchmarks.decode:decode")(options))
    print(f"wrote {options.out}")
    return 0
