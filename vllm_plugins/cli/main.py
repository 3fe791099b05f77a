# SPDX-License-Identifier: Apache-2.0
"""The entry point of `ppd` and its commands. Bad input ends with one line and exit code 2,
a signal with one line and 130.

Each command takes its options and returns the exit code. torch and transformers take
seconds to import, so data is checked first.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel, Field

from vllm_ppd.heads.data.records import check_data
from vllm_ppd.heads.errors import (
    HeadsError,
    MissingFile,
    UserError,
    termination_as_interrupt,
)
from vllm_ppd.heads.options import (
    CalibrationOptions,
    DataOptions,
    FitOptions,
    TrainingOptions,
)
from vllm_ppd.heads.provenance import versions
from vllm_ppd.heads.text import LONGEST_MESSAGE, in_words, shortened
from vllm_ppd.vllm_plugins.cli.arguments import Command, Group, Table, parse


class InspectOptions(BaseModel):
    """The heads to describe, and the target to check them against."""

    heads: str = Field(
        description="heads folder, or ORGANIZATION/NAME[@REVISION] on the Hub"
    )
    model: str | None = Field(
        None,
        description="target to check against (default: the target that the heads name)",
    )


def kinds() -> dict[str, Command]:
    """A command of `ppd train` for each kind of heads."""
    from vllm_ppd.heads.kinds import KINDS

    commands = {}
    for kind, config in KINDS.items():
        text = " ".join(str(config.options.__doc__).split()).split(": ", 1)[-1]
        commands[kind] = Command(
            text,
            text,
            train,
            config.options,
            example="--model MODEL --data chats.jsonl --out ./my-heads",
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
            resolve_name("vllm_ppd.benchmarks.systems:DecodeOptions"),
            example="--model MODEL --data prompts.jsonl --heads ./my-heads",
        )
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
    print(
        f"{trained}; held out, before -> after step {facts['held_out_after_step']}, "
        "the best:"
    )
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


def inspect(options: InspectOptions) -> int:
    """Describe heads, then check them as the server would; exit code 2 if it would refuse them."""
    from vllm_ppd.heads.folder import (
        CONFIG_NAME,
        load_calibration,
        load_config,
        load_tensors,
    )
    from vllm_ppd.heads.hub import whole_folder
    from vllm_ppd.heads.provenance import provenance_of
    from vllm_ppd.heads.target import check_on_disk, find_target

    given = options.model
    if given and Path(given).is_dir() and not Path(given, CONFIG_NAME).is_file():
        raise HeadsError(
            f"--model {given}: the folder has no {CONFIG_NAME}; pass the folder of a "
            "model"
        )
    folder = whole_folder(options.heads, ["*.json"])
    config = load_config(folder)
    is_fetched = folder == options.heads or any(
        Path(folder).glob("*.safetensors")
    )
    if is_fetched:
        load_tensors(folder)
    shapes = config.shapes().values()
    weights = f"{sum(map(math.prod, shapes)):,} numbers in {len(shapes)} tensors"
    lines = {"kind": config.kind}
    lines |= config.model_dump(
        mode="json", exclude={"fingerprint", "layer_tensors"}
    )
    lines["weights"] = weights if is_fetched else f"{weights}, not fetched"
    lines["trained"] = _if_there(
        lambda: "{0.time} ({0.command})".format(provenance_of(folder))
    )
    lines["calibrated"] = _if_there(lambda: load_calibration(folder) and "yes")
    width = max(map(len, lines))
    for field, value in lines.items():
        print(f"{field:<{width}}  {in_words(value)}")
    target = given or find_target(config.verifier, folder)
    try:
        other_weights = check_on_disk(config, folder, target)
    except HeadsError:
        print("will load: no")
        raise
    if other_weights is None:
        reason = f" {target!r}, which is not on this disk"
        verdict = (
            "not known: the folder is valid, but was not compared with its target"
            f"{reason if target else ', which it does not name'} (pass --model DIR)"
        )
    else:
        reason = f" ({other_weights})" if other_weights else ""
        verdict = f"yes, with {target}{reason}"
    if not is_fetched:
        verdict += "; weights are checked after they are fetched (`hf download`)"
    print(f"will load: {verdict}")
    return 0


def _if_there(read: Callable[[], object]) -> str:
    """A value from an optional file of heads, or why there is none, which does not keep
    heads from loading.
    """
    try:
        return str(read())
    except MissingFile:
        return "no"
    except HeadsError as error:
        return str(error)


COMMANDS: Table = {
    "fit": Command(
        "make heads for a model within a time limit",
        "Write data, then train and calibrate heads, within a time limit.\nThe same "
        "command resumes a run that was stopped.",
        fit,
        FitOptions,
        "model",
        "Qwen/Qwen3-8B --minutes 60 --prompts prompts.jsonl",
    ),
    "data": Command(
        "let the target write training data",
        "Let the target answer prompts, or write user turns and answer them.\nThe "
        "file has token IDs.",
        data,
        DataOptions,
        example="--model MODEL --out chats.jsonl --num-chats 3000",
    ),
    "train": Group("train heads", "Train heads for a target model.", kinds),
    "calibrate": Command(
        "measure heads and recommend a setting",
        "Measure how many drafts of a heads folder are accepted, and store the best "
        "setting in it.",
        calibrate,
        CalibrationOptions,
        "heads",
        "./my-heads --data held-out.jsonl",
    ),
    "bench": Group(
        "measure speeds and accepted drafts",
        "Compare speeds with those of vLLM.",
        benchmarks,
    ),
    "inspect": Command(
        "describe heads and check them",
        "Describe heads, and check them as the server would.",
        inspect,
        InspectOptions,
        "heads",
        "./my-heads --model MODEL",
    ),
}


def main(
    argv: Sequence[str] | None = None, table: Table = COMMANDS, prog: str = "ppd"
) -> int:
    """Run one of the commands; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    about = (
        "Train, measure and inspect heads for vllm-ppd. `ppd --version` prints "
        "versions for bug reports."
        if table is COMMANDS
        else ""
    )
    try:
        if "--version" in words:
            print(in_words(versions()))
            return 0
        with termination_as_interrupt():
            command, options = parse(words, table, prog, about)
            return command.run(options)
    except KeyboardInterrupt as stopped:
        print(f"{prog}: {str(stopped) or 'interrupted'}", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"{prog}: error: {_message(error)}", file=sys.stderr)
        return 2


def _message(error: Exception) -> str:
    if (
        isinstance(error, OSError)
        and error.filename is not None
        and error.strerror
    ):
        where = shortened(str(error.filename), LONGEST_MESSAGE // 2)
        instead = "check its permissions and the free space, or use another path"
        return f"{where} cannot be read or written ({error.strerror}); {instead}"
    return shortened(str(error))


if __name__ == "__main__":
    sys.exit(main())
