# SPDX-License-Identifier: Apache-2.0
"""`ppd plan`: what drafting will gain on a machine and under a load, and how to serve it."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan", help="predict speed-ups from a calibration and recommend how to serve",
        description="Predict speed-up and compute of every calibrated setting of some heads, on this machine or "
        "another, and say from which batch size on to stop drafting.", add_arguments=_add_arguments,
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_ppd.heads.planning.options import PlanOptions

    parser.add_argument(
        "folders", metavar="HEADS", nargs="+", help="heads with a calibration: folders, or names on the Hub"
    )
    add_fields(parser, PlanOptions, leave_out=frozenset({"heads"}), also={"model": "--target"})


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.heads.planning.options import PlanOptions
    from vllm_ppd.heads.planning.plan import make_fleets, make_plan
    from vllm_ppd.heads.planning.report import fleet_report, report

    args.heads = tuple(args.folders)
    options = options_from(PlanOptions, args)
    if options.latency is None:
        print(report(make_plan(options), options))
    else:
        print(fleet_report(*make_fleets(options), options))
    return 0
