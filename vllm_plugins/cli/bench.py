# SPDX-License-Identifier: Apache-2.0
"""`ppd bench KIND`: what each kind is; the benchmarks themselves are imported when one is asked for."""

from __future__ import annotations

import argparse
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.locking import writing_file
from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


class Kind(NamedTuple):
    """A benchmark: names within vllm_ppd.benchmarks, and what `--help` says."""

    options: str  # its options, a pydantic model
    run: str  # takes them, returns the text to print, or None where nothing was measured
    help: str
    description: str
    leave_out: frozenset[str] = frozenset()  # options that it has no flag for


KINDS = {
    "decode": Kind(
        "decode.options:DecodeOptions", "decode.run:run", "offline decoding",
        "Decode batches with vLLM alone, with heads, and with vLLM's own speculative methods, in turns, beside what "
        "`ppd plan` predicts.",
    ),
    "serve": Kind(
        "serve.options:ServeOptions", "serve.run:run", "real servers under load",
        "Put vLLM's own servers, alone and with heads, under requests at several rates and numbers at once by "
        "`vllm bench serve`, in turns.", frozenset({"temperatures"}),
    ),
    "acceptance": Kind(
        "papers.options:AcceptanceOptions", "papers.acceptance:run",
        "whether greedy text is vLLM's own on all of a file's prompts, and how many drafts are accepted",
        "Decode a file's chats with one contender after the other, drafting in every step.",
        frozenset({"temperature", "rounds", "alive"}),
    ),
    "curves": Kind(
        "results.options:CurvesOptions", "results.curves:run", "curves of training",
        "Draw the curves of one or several heads folders (curve.jsonl), and tell how flat they are at their end.",
    ),
    "tables": Kind(
        "papers.options:TablesOptions", "papers.run:run", "the papers' tables and figures, beside what they report",
        "Measure the tables and figures of the four papers on a model and data, beside what they report.",
    ),
}  # fmt: skip


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench", help="measure speeds, and the papers' tables", description="Measure speeds against vLLM's own."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{" + ",".join(KINDS) + "}")
    for name, kind in KINDS.items():
        sub = kinds.add_parser(
            name, help=kind.help, description=kind.description, add_arguments=partial(_add_arguments, kind)
        )
        sub.set_defaults(run=partial(run, kind))


def _add_arguments(kind: Kind, parser: argparse.ArgumentParser) -> None:
    add_fields(parser, _of_benchmarks(kind.options), kind.leave_out)


def run(kind: Kind, args: argparse.Namespace) -> int:
    options = options_from(_of_benchmarks(kind.options), args)
    check_data(getattr(options, "files", ()))
    with writing_file(options.out):  # runs add to what earlier ones have left there
        text = _of_benchmarks(kind.run)(options)
    print(text if text is not None else "nothing was measured")
    print(f"\nwrote {options.out}" if text is not None else "")
    return int(text is None)


def _of_benchmarks(name: str) -> Any:
    return resolve_name(f"vllm_ppd.benchmarks.{name}")
