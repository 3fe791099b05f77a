# SPDX-License-Identifier: Apache-2.0
"""Flags from pydantic models: names, defaults, choices and help are the fields' own; so are the errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.quote import LONGEST_VALUE, shortened

Options = TypeVar("Options", bound=BaseModel)


class CommandParser(argparse.ArgumentParser):
    """A parser that adds its arguments when it parses: the options of other commands are never imported.

    Args:
        add_arguments: adds them to the parser it is called with.
        settings: as for argparse.ArgumentParser; its subparsers are of this class, too.
    """

    def __init__(self, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._add_arguments = add_arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # how argparse runs a subparser, too
        add_arguments, self._add_arguments = self._add_arguments, None
        if add_arguments is not None:
            add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_fields(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    leave_out: frozenset[str] = frozenset(),
    also: Mapping[str, str] | None = None,
) -> None:
    """Add one flag a field; what the user leaves out stays out, so that the model's defaults are the only ones.

    Args:
        parser: where they are added.
        model: whose fields they are.
        leave_out: fields without a flag.
        also: a second flag of some fields.
    """
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        flag = "--" + name.replace("_", "-")
        shared: dict[str, Any] = {
            "dest": name, "default": argparse.SUPPRESS, "required": field.is_required(), "help": _help(field),
        }  # fmt: skip
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
        elif field.annotation == tuple[str, ...]:
            parser.add_argument(flag, nargs="+", action="extend", metavar="FILE", **shared)
        elif get_origin(field.annotation) is Literal:
            parser.add_argument(flag, choices=get_args(field.annotation), **shared)
        else:
            names = [flag, *([also[name]] if also and name in also else [])]
            parser.add_argument(*names, metavar=name.upper(), **shared)


def options_from(model: type[Options], args: argparse.Namespace) -> Options:
    """The model from parsed flags.

    Raises:
        UserError: on the first value that the model refuses, naming the flag.
    """
    given = {name: getattr(args, name) for name in model.model_fields if hasattr(args, name)}
    try:
        return model(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + str(problem["loc"][0] if problem["loc"] else "options").replace("_", "-")
        message, value = problem["msg"].removeprefix("Value error, "), shortened(str(problem["input"]), LONGEST_VALUE)
        raise UserError(f"{flag} {value}: {message[0].lower()}{message[1:]}") from None


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.is_required() or field.default in (None, (), False):
        return text
    return f"{text} (default {field.default})".replace("(default True)", "(default on)")
