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
)
from vllm_ppd.vllm_plugins.registry import METHODS

PREFIX = "ppd_"  # of argparse's destinations, beside those of vLLM's arguments


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
        text = (DraftingOptions.model_fields[name].description or "").replace("%", "%%")
        group.add_argument(
            flag_name(name), dest=PREFIX + name, default=argparse.SUPPRESS, metavar=name.upper(), help=text
        )
    return parser


def merge_flags(speculative_config: dict[str, Any] | None, args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config with what our flags gave.

    Raises:
        OptionError: if an option is given both ways, or a flag has a bad value.
    """
    flags = {name: getattr(args, PREFIX + name) for name in flag_fields() if hasattr(args, PREFIX + name)}
    if not flags:
        return speculative_config
    merged = dict(check_mapping(speculative_config))
    spelt = {key.replace("-", "_"): key for key in merged}
    for name, text in flags.items():
        if name in spelt:
            raise OptionError(
                f"{flag_name(name)} and --speculative-config[{spelt[name]!r}] are mutually exclusive; give one"
            )
        try:
            merged[name] = getattr(DraftingOptions.model_validate({name: text}, strict=False), name)
        except ValidationError as error:
            raise OptionError(f"{flag_name(name)}={first_problem(error)}") from None
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
