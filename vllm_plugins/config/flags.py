# SPDX-License-Identifier: Apache-2.0
"""Command-line flags, made from the configuration model: `--speculative-model` and one `--ppd-...` a field."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import ValidationError

from vllm_ppd.heads.quote import quoted
from vllm_ppd.vllm_plugins.config.options import (
    DraftingOptions,
    OptionError,
    first_problem,
    flag_fields,
    flag_name,
    methods_of,
)
from vllm_ppd.vllm_plugins.registry import METHODS

# One argparse destination holds what the --ppd-... flags gave, so that vLLM's own arguments stay as they are.
DESTINATION = "vllm_ppd_options"


class _Collect(argparse.Action):
    """Collect a flag's value into the dictionary at DESTINATION."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        collected = dict(getattr(namespace, DESTINATION, None) or {})
        collected[self.const] = values
        setattr(namespace, DESTINATION, collected)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to vLLM's parser; does nothing where they are there already."""
    if "--speculative-model" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("vllm-ppd", "Drafting with the target's own layers.")
    group.add_argument(
        "--speculative-model",
        dest="spec_model",
        default=argparse.SUPPRESS,
        help=f"a drafting method ({', '.join(METHODS)}), heads (a folder, or ORGANISATION/NAME[@REVISION] on the "
        "Hub), or any draft model vLLM knows",
    )
    method = parser._option_string_actions.get("--spec-method")
    if method is not None and method.choices is not None:
        method.choices = [*method.choices, *METHODS]
    for name in flag_fields():
        field = DraftingOptions.model_fields[name]
        group.add_argument(
            flag_name(name),
            dest=DESTINATION,
            const=name,
            action=_Collect,
            default=argparse.SUPPRESS,
            metavar=name.upper(),
            help=(field.description or "").replace("%", "%%"),
        )
    return parser


def parse_flag(field: str, text: str) -> Any:
    """The value of an option that a flag gives as text.

    Raises:
        OptionError: naming the flag.
    """
    try:
        return getattr(DraftingOptions.model_validate({field: text}, strict=False), field)
    except ValidationError as error:
        raise OptionError(f"{flag_name(field)}={first_problem(error)}") from None


def merge_flags(speculative_config: dict[str, Any] | None, flags: dict[str, str]) -> dict[str, Any]:
    """Put the flags into vLLM's speculative_config.

    Raises:
        OptionError: if an option is given both ways, or a flag has a bad value.
    """
    merged = dict(check_mapping(speculative_config))
    spelt = {key.replace("-", "_"): key for key in merged}
    for name, text in flags.items():
        if name in spelt:
            raise OptionError(
                f"{flag_name(name)} and --speculative-config[{spelt[name]!r}] are mutually exclusive; give one"
            )
        merged[name] = parse_flag(name, text)
    return merged


def check_mapping(speculative_config: Any) -> dict[str, Any]:
    """vLLM's speculative_config, {} for None.

    Raises:
        OptionError: if it is not a dictionary with names as its keys.
    """
    if speculative_config is None:
        return {}
    if not isinstance(speculative_config, dict):
        raise OptionError(
            f"speculative_config={quoted(speculative_config)} is not a JSON object; give one, such as "
            '{"method": "ppd"}'
        )
    for key in speculative_config:
        if not isinstance(key, str):
            raise OptionError(f"speculative_config: option {quoted(key)} is not a name; write names as strings")
    return speculative_config


def options_table() -> str:
    """The options as a Markdown table, which docs/serving.md has (a test compares them)."""
    lines = ["| option | flag | methods | default | meaning |", "| --- | --- | --- | --- | --- |"]
    flags = set(flag_fields())
    own = {"method": "--spec-method", "model": "--spec-model", "num_speculative_tokens": "--spec-tokens"}
    for name, field in DraftingOptions.model_fields.items():
        flag = flag_name(name) if name in flags else own[name]
        chosen = field.default is None and "(default:" in (field.description or "")
        default = "see there" if chosen else "none" if field.default is None else field.default
        methods = methods_of(name)
        who = "all" if len(methods) == len(METHODS) else ", ".join(methods)
        lines.append(f"| `{name}` | `{flag}` | {who} | {default} | {field.description} |")
    return "\n".join(lines)
