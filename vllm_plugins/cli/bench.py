# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode` and `ppd bench group`: speeds side by side, measured in turns."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


def add(subparsers: Any) -> None:
    from vllm_ppd.vllm_plugins.bench.group import GroupOptions
    from vllm_ppd.vllm_plugins.bench.options import DecodeOptions

    parser = subparsers.add_parser("bench", help="measure speeds", description="Measure speeds against vLLM's own.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{decode,group}")
    sub = kinds.add_parser(
        "decode", help="offline decoding",
        description="Decode batches with vLLM alone, with heads, and with vLLM's own speculative methods, in turns.",
    )  # fmt: skip
    add_fields(sub, DecodeOptions)
    sub.set_defaults(run=run)
    sub = kinds.add_parser(
        "group", help="a worker group over two pipeline stages",
        description="Decode with vLLM's own two pipeline stages, with a worker group over them, and with two "
        "tensor-parallel ranks, in turns, beside the paper's Theorem 4.1.",
    )  # fmt: skip
    add_fields(sub, GroupOptions, frozenset({"plain", "medusa", "eagle", "draft_model", "also", "drafts"}))
    sub.set_defaults(run=run_group)


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


def run_group(args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from vllm_ppd.vllm_plugins.bench.group import GroupOptions, contenders, table
    from vllm_ppd.vllm_plugins.bench.schedule import Stopped, decode

    options = options_from(GroupOptions, args)
    layers = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code).num_hidden_layers
    try:
        results = decode(options, contenders(options))
    except Stopped as stopped:
        print(f"ppd: {stopped}", file=sys.stderr)
        return 130
    print(table(results, layers))
    print(f"\nwrote {options.out}")
    return 0
