# SPDX-License-Identifier: Apache-2.0
"""`ppd bench KIND`: the benchmarks, which are imported when they are used."""

from functools import partial
from pkgutil import resolve_name
from typing import Any

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.locking import writing_file
from vllm_ppd.vllm_plugins.cli.arguments import Command


def commands() -> dict[str, Command]:
    """A command for each benchmark."""
    return {
        "decode": _command(
            "decode.options:DecodeOptions", "decode.run:run", "offline decoding",
            "Decode batches with vLLM alone, with heads, and with vLLM's own speculative methods, in turns.",
        ),
        "serve": _command(
            "serve.options:ServeOptions", "serve.run:run", "servers under load",
            "Load vLLM's servers, alone and with heads, with requests at several rates and concurrencies from "
            "`vllm bench serve`, in turns.", "temperatures",
        ),
        "acceptance": _command(
            "acceptance.options:AcceptanceOptions", "acceptance.run:run",
            "whether greedy text equals vLLM's on all prompts of a file, and how many drafts are accepted",
            "Decode a file's chats with one contender after the other, drafting in every step.",
            "temperature", "rounds", "alive", "together", "group", "turn_steps",
        ),
    }  # fmt: skip


def _command(options: str, function: str, summary: str, description: str, *hidden: str) -> Command:
    """The command of a benchmark: options and function are names in vllm_ppd.benchmarks; hidden ones have no flag."""
    return Command(summary, description, partial(run, function), f"benchmarks.{options}", hidden=frozenset(hidden))


def run(function: str, options: Any) -> int:
    """Check the data, measure, and print the function's text; None if nothing was measured."""
    check_data(getattr(options, "files", ()))
    with writing_file(options.out):  # runs add to the results of earlier runs
        text = resolve_name(f"vllm_ppd.benchmarks.{function}")(options)
    print("nothing was measured" if text is None else f"{text}\n\nwrote {options.out}")
    return int(text is None)
