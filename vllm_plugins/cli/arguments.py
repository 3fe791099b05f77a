# SPDX-License-Identifier: Apache-2.0
"""Commands and flags from pydantic models, whose fields give names, defaults, choices, help and errors."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened

Options = TypeVar("Options", bound=BaseModel)
METAVARS = {"heads": "FOLDER", "also": "NAME={JSON}"}  # others take files


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


class CommandParser(argparse.ArgumentParser):
    """A parser that adds its arguments when it parses, so that the options of other commands are never imported.

    Args:
        add_arguments: adds arguments to a parser.
        settings: as for argparse.ArgumentParser; subparsers are of this class, too.
    """

    def __init__(self, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._add_arguments = add_arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # also how argparse runs a subparser
        add_arguments, self._add_arguments = self._add_arguments, None
        if add_arguments is not None:
            add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_commands(commands: Mapping[str, Command | Group], parser: argparse.ArgumentParser) -> None:
    """Add a subparser per command, and one per group with those of its commands."""
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(commands) + "}")
    for name, command in commands.items():
        add_arguments = partial(_add_arguments, command)
        subparsers.add_parser(name, help=command.help, description=command.description, add_arguments=add_arguments)


def _add_arguments(command: Command | Group, parser: argparse.ArgumentParser) -> None:
    if isinstance(command, Group):
        add_commands(command.commands(), parser)
    else:
        _add_fields(command, parser)


def model_of(command: Command) -> type[BaseModel]:
    """The model of a command's options."""
    name = command.options
    return resolve_name(f"vllm_ppd.{name}") if isinstance(name, str) else name


def _add_fields(command: Command, parser: argparse.ArgumentParser) -> None:
    """Add one flag per field; flags that the user leaves out stay unset, so that the model's defaults apply."""
    parser.set_defaults(command=command)
    required: list[str] = []
    for name, field in model_of(command).model_fields.items():
        if name in command.hidden:
            continue
        settings: dict[str, Any] = {"help": _help(field), "metavar": name.upper()}
        if field.annotation is bool:
            settings |= {"action": argparse.BooleanOptionalAction, "metavar": None}
        elif field.annotation == tuple[str, ...]:
            settings |= {"nargs": "+", "metavar": METAVARS.get(name, "FILE")}
        elif get_origin(field.annotation) is Literal:
            settings |= {"choices": get_args(field.annotation), "metavar": None}
        if name == command.positional:
            parser.add_argument(name, **settings | {"metavar": name.upper()})
            # argparse would put it last in the usage, where it would look like another FILE.
            required.insert(0, name.upper() + (" ..." if "nargs" in settings else ""))
            continue
        if "nargs" in settings:
            settings["action"] = "extend"
        aliases = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
        flags = ["--" + str(alias).replace("_", "-") for alias in aliases]
        parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, required=field.is_required(), **settings)
        if field.is_required():
            required.append(f"{flags[0]} {settings['metavar']}")
    parser.usage = " ".join([parser.prog, *required, "[options]"])


def options_from(model: type[Options], args: argparse.Namespace) -> Options:
    """Make the model from parsed flags.

    Raises:
        UserError: on the first value that the model refuses, naming the flag.
    """
    values = {name: getattr(args, name) for name in model.model_fields if hasattr(args, name)}
    try:
        return model(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        message, where = problem["msg"].removeprefix("Value error, "), ""
        if problem["loc"]:  # else the options do not go together, and the message names them
            flag, value = str(problem["loc"][0]).replace("_", "-"), shortened(str(problem["input"]), LONGEST_VALUE)
            where = f"--{flag} {value}: "
        raise UserError(f"{where}{message[0].lower()}{message[1:]}") from None


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    # Not `in (None, False, ())`, which 0 is, too.
    if field.is_required() or field.default is None or field.default is False or field.default == ():
        return text
    return f"{text} (default {field.default})".replace("(default True)", "(default on)")
