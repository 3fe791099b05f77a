# SPDX-License-Identifier: Apache-2.0
"""Commands and flags from pydantic models; their fields give names, defaults, choices,
help and errors.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    CliVariadicArg,
    SettingsConfigDict,
    SettingsError,
)

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.text import first_problem

# What marks a field for pydantic-settings.
POSITIONAL = get_args(CliPositionalArg)[1:]
VARIADIC = get_args(CliVariadicArg)[1:]
# Stands for a comma within a word: pydantic-settings joins the words of a list by
# commas
COMMA = "\x1f"


class Settings(BaseSettings):
    """Flags beside those of a command's options. Lists stay text, which the options split."""

    model_config = SettingsConfigDict(enable_decoding=False)

    config: str | None = Field(
        None, description="YAML file of options; flags take precedence"
    )


class Command(NamedTuple):
    """A command, whose options are imported when it is used."""

    help: str
    description: str
    run: Callable[[Any], int]  # maps the options to the exit code
    options: str | type[BaseModel]  # the model, or "MODULE:CLASS" within vllm_ppd
    positional: str | None = None  # the field that takes no flag
    hidden: frozenset[str] = frozenset()  # fields that cannot be set


class Group(NamedTuple):
    """Commands under a common name, listed when it is used."""

    help: str
    description: str
    commands: Callable[[], Mapping[str, Command]]


Table = Mapping[str, Command | Group]


def parse(
    words: Sequence[str], table: Table, prog: str, about: str = ""
) -> tuple[Command, BaseModel]:
    """The command that words name, and its options.

    Raises:
        SystemExit: with 0 after help.
        UserError: on a word, or a value of a flag, that is not known.
    """
    first = words[0] if words else "--help"
    if first in ("-h", "--help"):
        width = max(map(len, table))
        names = "\n".join(
            f"  {name:<{width}}  {command.help}" for name, command in table.items()
        )
        print(
            f"usage: {prog} COMMAND ...\n\n{about}\n\n{names}\n\n`{prog} COMMAND "
            "--help` has more."
        )
        raise SystemExit(0)
    if first not in table:
        raise UserError(f"unknown command {first!r}; give one of {', '.join(table)}")
    command = table[first]
    prog = f"{prog} {first}"
    if isinstance(command, Group):
        return parse(words[1:], command.commands(), prog, command.description)
    return command, options_from(command, words[1:], prog)


def model_of(command: Command) -> type[BaseModel]:
    """The model of a command's options."""
    name = command.options
    return resolve_name(f"vllm_ppd.{name}") if isinstance(name, str) else name


def options_from(command: Command, words: Sequence[str], prog: str) -> BaseModel:
    """Options from flags and, where these leave them out, from the YAML file of
    --config.

    Raises:
        SystemExit: with 0 after help.
        UserError: on the first flag or value that the model refuses.
    """
    model = model_of(command)
    settings: Any = create_model(model.__name__, __base__=(Settings, model))
    settings.__doc__ = command.description
    for name in command.hidden:
        del settings.model_fields[name]
    lists = set()
    for name, field in settings.model_fields.items():
        markers: list[Any] = []
        if name == command.positional:
            markers += POSITIONAL
        if field.annotation == tuple[str, ...]:
            markers += VARIADIC
            lists.add(name)
        field.metadata = [*field.metadata, *markers]
    try:
        given = CliSettingsSource(
            settings,
            cli_prog_name=prog,
            cli_parse_args=[word.replace(",", COMMA) for word in words],
            cli_exit_on_error=False,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_implicit_flags=True,
            cli_kebab_case=True,
            add_argument_method=_add_argument,
            formatter_class=argparse.HelpFormatter,
        )()
    except SettingsError as error:
        reason = str(error).removeprefix("error parsing CLI: ")
        raise UserError(f"{reason}; `{prog} --help` lists the options") from None
    values = {name: _decoded(value, name in lists) for name, value in given.items()}
    file = values.pop("config", None)
    if file is not None:
        values = _from_yaml(file) | values
    try:
        return model(**values)
    except ValidationError as error:
        raise UserError(first_problem(error, _flag)) from None


def _add_argument(
    parser: argparse.ArgumentParser, *flags: str, **settings: Any
) -> argparse.Action:
    """Add an argument; types of lists and defaults of nothing are left out of its help."""
    if "[" in str(settings.get("metavar")):
        settings["metavar"] = flags[0].lstrip("-").replace("-", "_").upper()
    for default in ("None", "()"):
        settings["help"] = settings["help"].removesuffix(f" (default: {default})")
    return parser.add_argument(*flags, **settings)


def _decoded(value: Any, is_list: bool) -> Any:
    """A value with its commas; the words of a list."""
    if not isinstance(value, str):
        return value
    if is_list:
        return tuple(word.replace(COMMA, ",") for word in value.split(","))
    return value.replace(COMMA, ",")


def _from_yaml(file: str) -> dict[str, Any]:
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


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
