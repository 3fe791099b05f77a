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
from vllm_ppd.vllm_plugins.registry import METHODS

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
        "ppd",
        description="drafting method: "
        + ", ".join(f"{name} ({spec.title})" for name, spec in METHODS.items())
        + "; without heads or an option of early drafting such as exit_layer, ppd means lookup",
    )
    model: str | None = Field(
        None,
        description="heads folder, or heads on the Hub "
        "(ORGANISATION/NAME[@REVISION]); early drafting needs none: the exit is then "
        "read through the target's final norm and LM head",
    )
    heads: str = Field(
        AUTO,
        description="heads of method ppd: auto (those in the model's subfolder ppd, or "
        "those that `ppd fit` has made for it on this machine; none with an option "
        "of early drafting or pipeline parallelism), none, or what model takes",
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
        description="drafts per request and step (default 3, or what the heads "
        "recommend; 5 with method lookup); with pipeline parallelism the worker "
        "group emits up to one token more per step",
    )
    exit_layer: int | list[int] | None = Field(
        None,
        description="layer after which drafts are read (default: what the heads "
        "recommend, or half of the layers, on a GPU a quarter), or ascending layers "
        "such as [8, 16] (as a flag 8,16), of which each step takes the one that pays "
        "most; with pipeline parallelism, the layer at which the stages are split, at "
        "least half of the layers",
    )
    gamma: Share = Field(
        0.0,
        lt=1,
        description="confidence a draft must exceed (ParaDecode, eq. 1). All drafts "
        "of a step are verified together, those below it, too",
    )
    eps_b: Share | None = Field(
        None,
        le=1,
        description="back-off threshold of the joint (DynaMo, section 3.2.2): 0 "
        "drafts all tokens, 1 none (default: what the heads recommend); requests may "
        "set their own with vllm_xargs ppd_eps_b",
    )
    verify: bool = Field(
        True,
        description="false emits n-grams unverified, as in DynaMo's paper; this is "
        "NOT the target's output",
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "probabilistic",
        description="how drafts of sampling requests are drawn: the likeliest token "
        "(greedy), or a sample with the target's random numbers; in both cases the "
        "output is the target's",
    )
    draft_vocab_size: Count | None = Field(
        None,
        ge=16,
        description="draft only this many tokens, the most frequent in the heads' "
        "training data; drafting then reads only their part of the LM head (default: "
        "what the heads recommend; the vocabulary's size: all tokens)",
    )
    candidates: int = Field(
        1,
        ge=1,
        le=8,
        description="candidates for the next token that an idle pipeline stage "
        "starts (PPD's k); a batch of r requests computes r * candidates rows",
    )
    adaptive: bool | Literal["table"] = Field(
        True,
        description="draft as many tokens as pay off, or none, judged by accepted "
        "drafts and by the seconds of steps, as measured at start-up and as served. "
        "table judges by the start-up's seconds alone, so that the same requests give "
        "the same choices. false always drafts num_speculative_tokens",
    )
    step_costs: Literal["cached", "measure"] = Field(
        "cached",
        description="cached: measure step costs (for adaptive) at the first start "
        "with a model, settings and machine, and keep them next to vLLM's compile "
        "cache; measure: measure them again, for instance after a change that makes "
        "the machine faster or slower",
    )
    prompt_lookup_min: int | None = Field(
        None,
        ge=0,
        le=32,
        description="look in each request's prompt and output, too: if at least "
        "this many of its last tokens have occurred there before, the tokens after "
        "them are the draft, unless the method's drafts are accepted more often. 0 "
        "turns this off (default: 2; 3 with method lookup; off with verify false and "
        "with pipeline parallelism)",
    )
    disable_by_batch_size: Count | None = Field(
        None,
        description="batch cut-off: in larger batches no request drafts (default: "
        "none; 8 with pipeline parallelism)",
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
        if value not in METHODS:
            raise ValueError(f"must be one of {', '.join(METHODS)}")
        return value


def flag_fields() -> list[str]:
    """Fields that have a --ppd-... flag."""
    return [
        name for name in DraftingOptions.model_fields if name not in FLAGS_OF_VLLM
    ]


def flag_name(field: str) -> str:
    return FLAGS_OF_VLLM.get(field) or "--ppd-" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to vLLM's parser."""
    group = parser.add_argument_group(
        "vllm-ppd", "Drafting with the target's own layers."
    )
    group.add_argument(
        "--speculative-model",
        dest="spec_model",
        default=argparse.SUPPRESS,
        help=f"a drafting method ({', '.join(METHODS)}), heads (a folder, or "
        "ORGANISATION/NAME[@REVISION] on the Hub), or any draft model that vLLM "
        "supports",
    )
    method = parser._option_string_actions["--spec-method"]
    method.choices = [*(method.choices or ()), *METHODS]
    for name in flag_fields():
        text = (DraftingOptions.model_fields[name].description or "").replace(
            "%", "%%"
        )
        group.add_argument(
            flag_name(name),
            dest=PREFIX + name,
            default=argparse.SUPPRESS,
            metavar=name.upper(),
            help=text,
        )
    group.add_argument(
        "--no-ppd-learn",
        dest=PREFIX + "learn",
        action="store_const",
        const="false",
        default=argparse.SUPPRESS,
        help="the same as --ppd-learn false",
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
                "exclusive; give one"
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
            'give one, such as {"method": "ppd"}'
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
                f"{' and '.join(methods)}; leave it out with method {parsed.method!r}"
            )
    return parsed


def methods_of(field: str) -> list[str]:
    """The methods that read an option: those whose records name it, or all."""
    return [
        name for name, method in METHODS.items() if field in method.options
    ] or list(METHODS)
