# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`, whose modules are imported when it runs."""

from pkgutil import resolve_name
from typing import Any

from vllm_ppd.vllm_plugins.cli.arguments import Command


def commands() -> dict[str, Command]:
    """The benchmarks."""
    return {
        "decode": Command(
            "speed and accepted drafts of offline decoding",
            "Decode batches with vLLM alone, with heads, and with vLLM's own "
            "speculative methods, in turns.",
            run,
            "benchmarks.options:DecodeOptions",
        ),
    }


def run(options: Any) -> int:
    """Measure, and print the tables."""
    # Benchmarks import this package
    decode = resolve_name("vllm_ppd.benchmarks.decode:decode")
    print(decode(options))
    print(f"wrote {options.out}")
    return 0
