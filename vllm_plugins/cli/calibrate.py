# SPDX-License-Identifier: Apache-2.0
"""`ppd calibrate`: measure a heads folder, print tables like the papers', recommend a setting."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "calibrate", help="measure heads and recommend a setting",
        description="Measure match rates, likelihoods, expected acceptance and seconds a layer of a heads folder.",
        # argparse would put HEADS last, where it would be one more FILE.
        usage="ppd calibrate HEADS --data FILE [FILE ...] [options]", add_arguments=_add_arguments,
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_ppd.heads.calibration.options import CalibrationOptions

    parser.add_argument("folder", metavar="HEADS", help="heads folder, or ORGANISATION/NAME[@REVISION] on the Hub")
    add_fields(parser, CalibrationOptions, leave_out=frozenset({"heads"}), also={"model": "--target"})


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.heads.calibration.options import CalibrationOptions

    args.heads = args.folder
    options = options_from(CalibrationOptions, args)
    check_data(options.data, options.prompts)  # torch takes seconds to import

    from vllm_ppd.heads.calibration.report import report
    from vllm_ppd.heads.calibration.run import calibrate
    from vllm_ppd.heads.calibration.stored import NAME

    print(report(calibrate(options)))
    print(f"\nwrote {options.out or options.heads}/{NAME}")
    return 0
