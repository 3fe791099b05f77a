# SPDX-License-Identifier: Apache-2.0
"""The entry point of `ppd`. Bad input ends with one line and exit code 2, Ctrl-C or SIGTERM with one line and 130."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.quote import LONGEST_MESSAGE, shortened
from vllm_ppd.vllm_plugins.cli import bench, calibrate, data, env, inspect, plan, train
from vllm_ppd.vllm_plugins.cli.arguments import CommandParser

COMMANDS = (data, train, calibrate, plan, bench, inspect, env)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="ppd", description="Train, measure, plan and look at heads for vllm-ppd.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    from vllm_ppd.heads.training.signals import termination_as_interrupt

    args = make_parser().parse_args(argv)
    try:
        with termination_as_interrupt():
            return args.run(args)
    except KeyboardInterrupt as stopped:
        print(f"ppd: {str(stopped) or 'stopped; the same command continues it'}", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"ppd: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    text = shortened(str(error))
    if "o space left" in text or "isk quota" in text:
        text = shortened(text, LONGEST_MESSAGE // 2)
        return f"the disk is full ({text}); free some space and run the same command again: it continues"
    return text


if __name__ == "__main__":
    sys.exit(main())
