# SPDX-License-Identifier: Apache-2.0
"""Our options, declared once: flags, documentation and errors are made from them."""

import argparse
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from vllm_ppd.heads.base import Drafts
from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.text import first_problem, quoted
from vllm_ppd.vllm_plugins.registry import METHODS, PPD, PPD_OPTIONS, names

# Where our resolved options travel inside VllmConfig.additional_config.
CONFIG_KEY = "vllm_ppd"

# Values of the option `heads` that name none
AUTO = "auto"
NONE = "none"

# Prefix of our flags' argparse destinations, which vLLM's arguments do not have
PREFIX = "ppd_"
FLAGS_OF_VLLM = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
}

Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OptionError(UserError):
    """A bad option of the server's command line or configuration."""


class DraftingOptions(BaseModel):
    """Options of the drafting methods, as given by the user.

    They are keys of speculative_config, or flags: vLLM's (FLAGS_OF_VLLM) or ours
    (--ppd-...). A field that the records of some methods name is refused with other
    methods. Types are strict: true is not 1, and 3.0 is not 3.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), strict=True
    )

    method: str = Field(
        PPD,
        description="drafting method: "
        + ", ".join(f"{name} ({spec.title})" for name, spec in METHODS.items())
        + ". ppd stands for the method of the heads, for group with pipeline "
        "parallelism, for early with exit_layer or gamma, and for lookup if no heads are "
        "found. paradecode stands for early",
    )
    model: str | None = Field(
        None,
        description="heads folder, or heads on the Hub (ORGANIZATION/NAME[@REVISION]). "
        "early and group need none: an exit then goes through the final norm and the "
        "LM head of the target",
    )
    heads: str = Field(
        AUTO,
        description="heads of method ppd: auto (those in the subfolder ppd of the model, "
        "or those that `ppd fit` made for it on this machine), none, or a value of model",
    )
    learn: bool = Field(
        True,
        description="method ppd, where it finds no heads: learn some from the answers "
        "that it serves",
    )
    learn_dir: str | None = Field(
        None,
        description="folder for learned heads, which the next start reads (default: "
        "they are not written)",
    )
    num_speculative_tokens: Drafts = Field(
        3,
        description="maximum number of drafts per request and step (default: 3, or "
        "what the heads recommend; 5 with method lookup). A worker group emits up to "
        "one token more per step",
    )
    exit_layer: int | list[int] | None = Field(
        None,
        description="layer after which the target exits to draft (default: what the "
        "heads recommend, or half of the layers, on a GPU a quarter), or ascending "
        "layers such as [8, 16] (as a flag 8,16), from which each step takes the one "
        "that is expected to gain most. In a worker group, the layer that splits the "
        "stages, at least half of the layers",
    )
    gamma: Share = Field(
        0.0,
        lt=1,
        description="confidence below which a request stops drafting (ParaDecode, "
        "eq. 1). A step still verifies all of its drafts",
    )
    eps_b: Share | None = Field(
        None,
        le=1,
        description="back-off threshold of the joint (DynaMo, section 3.2.2): 0 "
        "drafts all tokens, 1 none (default: what the heads recommend). A request can "
        "set its own with vllm_xargs ppd_eps_b",
    )
    verify: bool = Field(
        True,
        description="false emits n-grams without verification, as in the paper on "
        "DynaMo; the output is then NOT that of the target",
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "probabilistic",
        description="how sampling requests draft: the likeliest token (greedy), or a "
        "sample with the random numbers of the target. Neither changes the output",
    )
    draft_vocab_size: Count | None = Field(
        None,
        ge=16,
        description="draft only from the N most frequent tokens of the training data "
        "of the heads, with their rows of the LM head (default: what the heads "
        "recommend; the size of the vocabulary means all tokens)",
    )
    candidates: int = Field(
        1,
        ge=1,
        le=8,
        description="candidates for the next token that an idle pipeline stage starts "
        "(k of PPD); the stage computes this number of rows per request",
    )
    adaptive: bool | Literal["table"] = Field(
        True,
        description="choose the number of drafts of each step, or none, by accepted "
        "drafts and by the durations of steps, measured at start-up and while serving. "
        "table uses only the durations of the start-up, so that the same requests give "
        "the same choices. false always drafts num_speculative_tokens",
    )
    step_costs: Literal["cached", "measure"] = Field(
        "cached",
        description="cached measures the durations of steps (for adaptive) at the first "
        "start with a model, settings and machine, and keeps them next to vLLM's "
        "compile cache. measure measures them again, for instance after a change that "
        "makes the machine faster or slower",
    )
    prompt_lookup_min: int | None = Field(
        None,
        ge=0,
        le=32,
        description="minimum length of a match for prompt lookup: if the last N tokens "
        "of a request occurred in it before, it drafts the tokens that followed them, "
        "unless the drafts of the method are accepted more often. 0 turns lookups off "
        "(default: 2; off with verify false and in a worker group)",
    )
    disable_by_batch_size: Count | None = Field(
        None,
        description="number of requests above which a batch does not draft (default: "
        "none; 8 in a worker group)",
    )

    @field_validator("exit_layer", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        """One layer, or a list of several."""
        layers = value
        if value is None:
            return None
        if isinstance(value, str):
            layers = [
                int(part) if part.strip().isdecimal() else part
                for part in value.split(",")
            ]
        elif not isinstance(value, list):
            layers = [value]
        numbers = all(type(layer) is int and layer > 0 for layer in layers)
        if not layers or not numbers or layers != sorted(set(layers)):
            raise ValueError(
                "must be a layer from 1 on, or ascending ones such as [8, 16]"
            )
        return layers if len(layers) > 1 else layers[0]

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in names():
            raise ValueError(f"must be one of {', '.join(names())}")
        return value


def flag_fields() -> list[str]:
    """Fields that have a --ppd-... flag."""
    return [
        name for name in DraftingOptions.model_fields if name not in FLAGS_OF_VLLM
    ]


def flag_name(field: str) -> str:
    flag = "--ppd-" + field.replace("_", "-")
    return FLAGS_OF_VLLM.get(field) or flag.replace("--ppd-no-", "--no-ppd-")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to vLLM's parser; `vllm serve --help=vllm-ppd` lists them."""
    group = parser.add_argument_group(
        "vllm-ppd", "Speculative decoding, such as --speculative-model ppd."
    )
    group.add_argument(
        "--speculative-model",
        dest="spec_model",
        default=argparse.SUPPRESS,
        help=f"a drafting method ({', '.join(names())}), heads (a folder, or "
        "ORGANIZATION/NAME[@REVISION] on the Hub), or any draft model that vLLM "
        "supports",
    )
    method = parser._option_string_actions["--spec-method"]
    method.choices = [*(method.choices or ()), *names()]
    for name in flag_fields():
        field = DraftingOptions.model_fields[name]
        group.add_argument(
            flag_name(name),
            dest=PREFIX + name,
            default=argparse.SUPPRESS,
            metavar=name.upper(),
            help=str(field.description).replace("%", "%%"),
        )
        if field.default is True:
            group.add_argument(
                flag_name(f"no_{name}"),
                dest=PREFIX + name,
                default=argparse.SUPPRESS,
                action="store_false",
                help=f"the same as {flag_name(name)} false",
            )
    return parser


def merge_flags(
    speculative_config: dict[str, Any] | None, args: argparse.Namespace
) -> dict[str, Any] | None:
    """vLLM's speculative_config with the values of our flags added.

    Raises:
        OptionError: if an option is given both ways, or a flag has a bad value.
    """
    merged = dict(check_mapping(speculative_config))
    names = {key.replace("-", "_") for key in merged}
    for name in flag_fields():
        text = getattr(args, PREFIX + name, None)
        if text is None:
            continue
        if name in names:
            raise OptionError(
                f"{flag_name(name)} and --speculative-config[{name!r}] are mutually "
                "exclusive; set one"
            )
        try:
            options = DraftingOptions.model_validate({name: text}, strict=False)
        except ValidationError as error:
            raise OptionError(first_problem(error, flag_name)) from None
        merged[name] = getattr(options, name)
    return merged or speculative_config


def check_mapping(speculative_config: Any) -> dict[str, Any]:
    """vLLM's speculative_config, {} for None.

    Raises:
        OptionError: if it is not a dictionary.
    """
    if not isinstance(speculative_config, dict | None):
        raise OptionError(
            f"speculative_config={quoted(speculative_config)} is not a JSON object; "
            'set one, such as {"method": "ppd"}'
        )
    return speculative_config or {}


def parse_options(options: Mapping[str, Any]) -> DraftingOptions:
    """Parse and check a speculative_config for one of our methods; None leaves an
    option out.

    Raises:
        OptionError: on the first problem, naming the option and, for an unknown one,
            the nearest known.
    """
    given = {key: value for key, value in options.items() if value is not None}
    try:
        parsed = DraftingOptions(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        message = first_problem(error)
        if problem["type"] == "extra_forbidden":
            known = list(DraftingOptions.model_fields)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"known options: {', '.join(known)}"
            if near:
                hint = f"did you mean {near[0]!r}?"
            message = f"unknown option {quoted(name)}; {hint}"
        raise OptionError(f"speculative_config: {message}") from None
    for name in given:
        methods = methods_of(name)
        if parsed.method not in methods:
            raise OptionError(
                f"speculative_config: {name} is an option of method "
                f"{' and '.join(methods)}; remove it with method {parsed.method!r}"
            )
    return parsed


def methods_of(field: str) -> list[str]:
    """The methods that read an option: those whose records name it, or all."""
    if field in PPD_OPTIONS:
        return [PPD]
    return [
        name for name, method in METHODS.items() if field in method.options
    ] or names()
