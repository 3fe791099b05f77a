# SPDX-License-Identifier: Apache-2.0
"""Documented commands can be pasted, and documented flags exist."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
from configured import serve_parser
from conftest import ROOT
from vllm.benchmarks.serve import add_cli_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ppd.benchmarks.models.__main__ import COMMANDS as MODELS
from vllm_ppd.vllm_plugins.cli.arguments import Command, Table, flag_of, parse
from vllm_ppd.vllm_plugins.cli.main import COMMANDS

# The changelog and results name flags of earlier versions
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/*/README.md"),
]
PAGES = [
    page
    for page in PAGES
    if page.name != "CHANGELOG.md" and page.parent.name != "results"
]
OURS: dict[str, Table] = {
    "ppd": COMMANDS,
    "python -m vllm_ppd.benchmarks.models": MODELS,
}
# Of make serve, scripts with a parser of their own, and commands that are not ours
OTHERS = {
    *(
        "--config",
        "--help",
        "--version",
        "--page",
        "--plot",
        "--record",
        "--only",
    ),
    *(
        "--requests",
        "--options",
        "--latency",
        "--cpu",
        "--times",
        "--vocabulary-sample",
    ),
    *("--system", "--local-dir", "--nproc-per-node", "--gpus", "--ppd-"),
}


def vllm_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of vLLM's commands, with our flags."""
    bench = FlexibleArgumentParser()
    add_cli_args(bench)
    return {"vllm serve": serve_parser(), "vllm bench serve": bench}


def commands(page: Path, name: str) -> Iterator[list[str]]:
    """The words after a command's name, of each line of code that begins with it."""
    text = page.read_text().replace("\\\n", " ")
    variables = dict(re.findall(r'^ +(\w+)="(.*)"$', text, re.MULTILINE))
    for line in re.findall(rf"^ {{4,}}{name} (.*)$", text, re.MULTILINE):
        line = Template(line).safe_substitute(variables)
        words = shlex.split(line.replace("$RANK", "1"), comments=True)
        yield [word for word in words if word != "..."]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_documented_commands_are_valid(page: Path) -> None:
    for name, table in OURS.items():
        for words in commands(page, name):
            parse(words, table, name)
    for name, parser in vllm_parsers().items():
        for words in commands(page, name):
            parser.parse_args(words)


def flags_of(table: Table) -> Iterator[str]:
    for command in table.values():
        if isinstance(command, Command):
            for field in command.options.model_fields:
                yield flag_of(field)
                yield flag_of(f"no_{field}")
        else:
            yield from flags_of(command.commands())


def test_documented_flags_exist() -> None:
    known = OTHERS.union(*map(flags_of, OURS.values()))
    for parser in vllm_parsers().values():
        actions: Any = parser._option_string_actions
        known |= actions.keys()
    for page in PAGES:
        named = re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())
        assert set(named) <= known, page
