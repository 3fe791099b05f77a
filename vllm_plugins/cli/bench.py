# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`, `serve` and `group`: speeds side by side, measured in turns; and the papers' tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.bench.results import Measured

Found = TypeVar("Found")


def add(subparsers: Any) -> None:
    from vllm_ppd.vllm_plugins.bench.group import GroupOptions
    from vllm_ppd.vllm_plugins.bench.options import DecodeOptions
    from vllm_ppd.vllm_plugins.bench.serve_options import ServeOptions
    from vllm_ppd.vllm_plugins.bench.tables.options import TablesOptions

    parser = subparsers.add_parser(
        "bench", help="measure speeds, and the papers' tables", description="Measure speeds against vLLM's own."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{decode,serve,group,tables}")
    sub = kinds.add_parser(
        "decode", help="offline decoding",
        description="Decode batches with vLLM alone, with heads, and with vLLM's own speculative methods, in turns.",
    )  # fmt: skip
    add_fields(sub, DecodeOptions)
    sub.set_defaults(run=run)
    sub = kinds.add_parser(
        "serve", help="real servers under load",
        description="Put vLLM's own servers, alone and with heads, under requests at several rates and numbers at once "
        "by `vllm bench serve`, in turns.",
    )  # fmt: skip
    add_fields(sub, ServeOptions)
    sub.set_defaults(run=run_serve)
    sub = kinds.add_parser(
        "group", help="a worker group over two pipeline stages",
        description="Decode with vLLM's own two pipeline stages, with a worker group over them, and with two "
        "tensor-parallel ranks, in turns, beside the paper's Theorem 4.1.",
    )  # fmt: skip
    add_fields(
        sub, GroupOptions, frozenset({"plain", "medusa", "eagle", "draft_model", "also", "drafts", "temperatures"})
    )
    sub.set_defaults(run=run_group)
    sub = kinds.add_parser(
        "tables", help="the papers' tables and figures, beside what they report",
        description="Measure the tables and figures of the four papers on a model and data, beside what they report.",
    )  # fmt: skip
    add_fields(sub, TablesOptions)
    sub.set_defaults(run=run_tables)


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.vllm_plugins.bench.options import DecodeOptions
    from vllm_ppd.vllm_plugins.bench.schedule import decode
    from vllm_ppd.vllm_plugins.bench.table import table

    options = options_from(DecodeOptions, args)
    return _measured(lambda: decode(options), lambda runs: "\n\n".join(map(table, runs)), options.out)


def run_serve(args: argparse.Namespace) -> int:
    from vllm_ppd.vllm_plugins.bench.serve import serve
    from vllm_ppd.vllm_plugins.bench.serve_options import ServeOptions
    from vllm_ppd.vllm_plugins.bench.serve_table import table

    options = options_from(ServeOptions, args)
    return _measured(lambda: serve(options), table, options.out)


def run_group(args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from vllm_ppd.vllm_plugins.bench.group import GroupOptions, contenders, splits_of, table
    from vllm_ppd.vllm_plugins.bench.schedule import decode

    options = options_from(GroupOptions, args)
    layers = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code).num_hidden_layers

    def measure() -> Measured:
        everyone = contenders(options)
        return decode(options, everyone, num_layers=layers, splits=splits_of(everyone, layers))[0]

    return _measured(measure, lambda found: table(found, layers), options.out)


def _measured(measure: Callable[[], Found], table: Callable[[Found], str], out: str) -> int:
    """Measure and print the table."""
    print(table(measure()))
    print(f"\nwrote {out}")
    return 0


def run_tables(args: argparse.Namespace) -> int:
    from vllm_ppd.vllm_plugins.bench.tables.options import TablesOptions
    from vllm_ppd.vllm_plugins.bench.tables.render import render
    from vllm_ppd.vllm_plugins.bench.tables.run import make_tables

    options = options_from(TablesOptions, args)
    tables, left_out = make_tables(options)
    print("\n\n".join([*map(render, tables), *(f"left out: {key}: {reason}" for key, reason in left_out.items())]))
    print(f"\nwrote {options.out}" if tables else "\nnothing was measured")
    return 0 if tables else 1
