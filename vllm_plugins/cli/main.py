# SPDX-License-Identifier: Apache-2.0
"""The entry point of `ppd`. Bad input ends with one line and exit code 2, a signal with
one line and 130.
"""

import sys
from collections.abc import Sequence

from vllm_ppd.heads.errors import UserError, termination_as_interrupt
from vllm_ppd.heads.text import LONGEST_MESSAGE, shortened
from vllm_ppd.vllm_plugins.cli import commands, inspect
from vllm_ppd.vllm_plugins.cli.arguments import Command, Group, Table, parse

COMMANDS: Table = {
    "fit": Command(
        "make heads for a model within a time limit",
        "Write data, then train and calibrate heads, as well as this machine can "
        "within a time limit. The same command resumes a stopped run.",
        commands.fit,
        "heads.options:FitOptions",
        positional="model",
    ),
    "data": Command(
        "let the target write training data",
        "Let the target answer prompts, or write user turns and answer them. The "
        "file has token IDs.",
        commands.data,
        "heads.options:DataOptions",
    ),
    "train": Group(
        "train heads", "Train heads for a target model.", commands.kinds
    ),
    "calibrate": Command(
        "measure heads and recommend a setting",
        "Measure how many drafts of a heads folder are accepted, and store the best "
        "setting in it.",
        commands.calibrate,
        "heads.options:CalibrationOptions",
        positional="heads",
    ),
    "bench": Group(
        "measure speeds and accepted drafts",
        "Measure speeds against vLLM's own.",
        commands.benchmarks,
    ),
    "inspect": Command(
        "describe heads and check them",
        "Describe heads, and check them as the server would.",
        inspect.run,
        inspect.InspectOptions,
        positional="heads",
    ),
}


def main(
    argv: Sequence[str] | None = None, table: Table = COMMANDS, prog: str = "ppd"
) -> int:
    """Run one of the commands; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    about = (
        "Train, measure and inspect heads for vllm-ppd."
        if table is COMMANDS
        else ""
    )
    try:
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
    text = shortened(str(error))
    if "o space left" in text or "isk quota" in text:
        text = shortened(text, LONGEST_MESSAGE // 2)
        return f"the disk is full ({text}); free some space and run the same command again"
    if (
        isinstance(error, OSError)
        and error.filename is not None
        and error.strerror
    ):
        where = shortened(str(error.filename), LONGEST_MESSAGE // 2)
        instead = "check its permissions, or give another path"
        return f"{where} cannot be read or written ({error.strerror}); {instead}"
    return text


if __name__ == "__main__":
    sys.exit(main())
