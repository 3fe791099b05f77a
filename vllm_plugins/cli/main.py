# SPDX-License-Identifier: Apache-2.0
"""The entry point of `ppd`. Bad input ends with one line and exit code 2, Ctrl-C or SIGTERM with one line and 130."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.quote import LONGEST_MESSAGE, shortened
from vllm_ppd.heads.training.signals import termination_as_interrupt
from vllm_ppd.vllm_plugins.cli import bench, commands, data, fit, inspect
from vllm_ppd.vllm_plugins.cli.arguments import Command, CommandParser, Group, add_commands, model_of, options_from

COMMANDS: dict[str, Command | Group] = {
    "fit": Command(
        "make heads for a model within a time limit",
        "Write data, then train, calibrate and plan heads, as well as this machine can within a time limit; run the "
        "same command again to resume.",
        fit.run, "heads.fitting.options:FitOptions", positional="model",
    ),
    "data": Command(
        "let the target write training data",
        "Let the target answer prompts, or write user turns and answer them; stores token IDs.",
        data.run, "heads.generation.options:DataOptions",
    ),
    "train": Group("train heads", "Train heads for a target model.", commands.kinds),
    "calibrate": Command(
        "measure heads and recommend a setting",
        "Measure match rates, likelihoods, expected acceptance and seconds per layer for a heads folder.",
        commands.calibrate, "heads.calibration.options:CalibrationOptions", positional="heads",
    ),
    "plan": Command(
        "predict speed-ups from a calibration and recommend how to serve",
        "Predict speed-up and compute of every calibrated setting of some heads, on this machine or another, and say "
        "from which batch size on to stop drafting.",
        commands.plan, "heads.planning.options:PlanOptions", positional="heads",
    ),
    "bench": Group("measure speeds and accepted drafts", "Measure speeds against vLLM's own.", bench.commands),
    "inspect": Command(
        "describe heads and check them", "Describe heads, and check them as the server would.",
        inspect.run, inspect.InspectOptions, positional="heads",
    ),
}  # fmt: skip


def make_parser(table: Mapping[str, Command | Group] = COMMANDS, prog: str = "ppd") -> argparse.ArgumentParser:
    description = "Train, measure, plan and inspect heads for vllm-ppd." if table is COMMANDS else None
    parser = CommandParser(prog=prog, description=description)
    add_commands(table, parser)
    return parser


def main(argv: Sequence[str] | None = None, table: Mapping[str, Command | Group] = COMMANDS, prog: str = "ppd") -> int:
    """Run one of the commands; returns the exit code."""
    args = make_parser(table, prog).parse_args(argv)
    try:
        with termination_as_interrupt():
            return args.command.run(options_from(model_of(args.command), args))
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
        return f"the disk is full ({text}); free some space and run the same command again: it continues"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        where = shortened(str(error.filename), LONGEST_MESSAGE // 2)
        instead = "check its permissions, or give another path"
        return f"{where} cannot be read or written ({error.strerror}); {instead}"
    return text


if __name__ == "__main__":
    sys.exit(main())
