# SPDX-License-Identifier: Apache-2.0
"""`ppd bench KIND`: what each kind is; the benchmarks themselves are imported when one is asked for."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.locking import writing_file
from vllm_ppd.vllm_plugins.cli.arguments import Command


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
        frozenset({"temperature", "rounds", "alive", "together", "group", "turn_steps"}),
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


def commands() -> dict[str, Command]:
    """A command for each benchmark."""
    return {
        name: Command(
            kind.help, kind.description, partial(run, kind), f"benchmarks.{kind.options}", hidden=kind.leave_out
        )
        for name, kind in KINDS.items()
    }


def run(kind: Kind, options: Any) -> int:
    check_data(getattr(options, "files", ()))
    with writing_file(options.out):  # runs add to what earlier ones have left there
        text = resolve_name(f"vllm_ppd.benchmarks.{kind.run}")(options)
    print(text if text is not None else "nothing was measured")
    print(f"\nwrote {options.out}" if text is not None else "")
    return int(text is None)
