# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: speeds of methods side by side, measured in turns."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


def add(subparsers: Any) -> None:
    from vllm_ppd.vllm_plugins.bench.options import DecodeOptions

    parser = subparsers.add_parser("bench", help="measure speeds", description="Measure speeds against vLLM's own.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{decode}")
    sub = kinds.add_parser(
        "decode", help="offline decoding",
        description="Decode batches with vLLM alone, with heads, and with vLLM's own speculative methods, in turns.",
    )  # fmt: skip
    add_fields(sub, DecodeOptions)
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.vllm_plugins.bench.options import DecodeOptions
    from vllm_ppd.vllm_plugins.bench.schedule import Stopped, decode
    from vllm_ppd.vllm_plugins.bench.table import table

    options = options_from(DecodeOptions, args)
    try:
        results = decode(options)
    except Stopped as stopped:
        print(f"ppd: {stopped}", file=sys.stderr)
        return 130
    print(table(results))
    print(f"\nwrote {options.out}")
    return 0
