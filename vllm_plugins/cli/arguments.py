# SPDX-License-Identifier: Apache-2.0
"""Commands and flags from pydantic models; their fields give names, defaults, choices,
help and errors.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.text import first_problem, in_words


class Command(NamedTuple):
    """A command and its options."""

    help: str
    description: str
    run: Callable[[Any], int]  # maps the options to the exit code
    options: type[BaseModel]
    positional: str | None = None  # the field that takes no flag
    example: str = ""  # what follows the command's name


class Group(NamedTuple):
    """Commands under a common name, listed when it is used."""

    help: str
    description: str
    commands: Callable[[], Mapping[str, Command]]


Table = Mapping[str, Command | Group]


class Parser(argparse.ArgumentParser):
    """A parser of flags that raises a UserError, and knows no defaults."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the options")


def parse(
    words: Sequence[str], table: Table, prog: str, about: str = ""
) -> tuple[Command, BaseModel]:
    """The command that words name, and its options.

    Raises:
        SystemExit: with 0 after help.
        UserError: on a word, or a value of a flag, that is not known.
    """
    first = words[0] if words else "--help"
    if first == "-h" or first.startswith("--help"):
        width = max(map(len, table))
        names = "\n".join(
            f"  {name:<{width}}  {command.help}"
            for name, command in table.items()
        )
        print(
            f"usage: {prog} COMMAND ...\n\n{about}\n\n{names}\n\n`{prog} COMMAND "
            "--help` has more."
        )
        raise SystemExit(0)
    if first not in table:
        raise UserError(
            f"unknown command {first!r}; use one of {', '.join(table)}"
        )
    command = table[first]
    prog = f"{prog} {first}"
    if isinstance(command, Group):
        return parse(words[1:], command.commands(), prog, command.description)
    return command, options_from(command, words[1:], prog)


def options_from(command: Command, words: Sequence[str], prog: str) -> BaseModel:
    """Options from flags and, where flags do not set them, from the YAML file of
    --config.

    As in vLLM, --help=all lists every option, and --help=WORD those whose names have
    the word; --help lists the basic ones.

    Raises:
        SystemExit: with 0 after help.
        UserError: on the first flag or value that the model refuses.
    """
    searches = [word[7:] for word in words if word.startswith("--help=")]
    fields = command.options.model_fields
    shown: Any = getattr(command.options, "basic", None) or fields
    epilog = ""
    if command.example:
        epilog = f"example:\n  {prog} {command.example}"
    if len(shown) < len(fields):
        epilog += (
            f"\n\n`{prog} --help=all` lists all options, and --help=WORD those whose "
            "names have the word."
        )
    if searches:
        words = ["--help"]
        word = searches[0].replace("-", "_")
        shown = {name for name in fields if word == "all" or word in name}
    parser = Parser(
        prog=prog,
        description=command.description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in fields.items():
        add_field(parser, name, field, name == command.positional, name in shown)
    parser.add_argument(
        "--config", help="YAML file of options; flags take precedence"
    )
    values = vars(parser.parse_args(words))
    file = values.pop("config", None)
    if file is not None:
        values = from_yaml(file) | values
    try:
        return command.options(**values)
    except ValidationError as error:
        raise UserError(first_problem(error, flag_of)) from None


def add_field(
    parser: Parser, name: str, field: FieldInfo, positional: bool, is_shown: bool
) -> None:
    """Add the flags of a field, or the positional argument that sets it."""
    about = (field.description or "").replace("%", "%%")
    if field.is_required():
        about += " (required)"
    elif field.default not in (None, ()):
        about += f" (default: {in_words(field.default)})"
    settings: dict[str, Any] = {"help": about if is_shown else argparse.SUPPRESS}
    if field.annotation in (bool, bool | None):
        settings["action"] = argparse.BooleanOptionalAction
    elif field.annotation in (int, int | None):
        settings["metavar"] = "N"
    elif field.annotation == tuple[str, ...]:
        settings["action"] = "extend"
        settings["nargs"] = "+"
    elif get_origin(field.annotation) is Literal:
        settings["metavar"] = f"{{{','.join(get_args(field.annotation))}}}"
    if positional:
        parser.add_argument(name, metavar=name.upper(), **settings)
        return
    parser.add_argument(flag_of(name), dest=name, **settings)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def from_yaml(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as opened:
            return {
                name.replace("-", "_"): value
                for name, value in yaml.safe_load(opened).items()
            }
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise UserError(
            f"--config {file} is no YAML file of options: {error}"
        ) from None
