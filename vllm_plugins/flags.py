# SPDX-License-Identifier: Apache-2.0
"""Command-line flags, made from the configuration model: `--speculative-model` and one `--ppd-...` a field."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_ppd.vllm_plugins.config import DraftingOptions, OptionError, flag_fields, flag_name
from vllm_ppd.vllm_plugins.methods import METHODS

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
        help=f"a drafting method ({', '.join(METHODS)}), a heads folder, or any draft model vLLM knows",
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


def merge_flags(speculative_config: dict[str, Any] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Put the flags into vLLM's speculative_config.

    Raises:
        OptionError: if an option is given both ways.
    """
    merged = dict(speculative_config or {})
    for name, value in flags.items():
        if name in merged:
            raise OptionError(f"{flag_name(name)} and --speculative-config[{name!r}] are mutually exclusive; give one")
        merged[name] = value
    return merged
