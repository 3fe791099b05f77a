# SPDX-License-Identifier: Apache-2.0
"""Our options, declared once: flags, documentation and errors are made from them."""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_ppd.heads.base import Drafts
from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.text import first_problem, quoted
from vllm_ppd.vllm_plugins.registry import METHODS

# Where our resolved options travel inside VllmConfig.additional_config.
CONFIG_KEY = "vllm_ppd"

# Prefix of our flags' argparse destinations, which vLLM's arguments do not have
PREFIX = "ppd_"
FLAGS_OF_VLLM = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
}

LONGEST_LOOKUP = 32  # tokens that the prompt lookup compares
LARGEST = 2**31 - 1  # bound of counts without a lower one
# Options of earlier releases, and what to do instead.
REMOVED = {
    "runner": "leave it out; every method runs on vLLM's model runner V2",
    "schedule": "leave it out; only the deferred schedule is left, which was faster",
    "adaptive_verification": "leave it out; adaptive chooses the number of drafts",
    "max_drafting_requests": (
        "use disable_by_batch_size; all requests of a step draft, or none"
    ),
}

LONGEST_NAME = 64  # characters that are compared with the options' names
LEAST_LIKENESS = 0.5  # of an unknown option to the one that it is taken to mean

# Words of other engines' options, and ours for the same thing.
_SAME = {
    "assistant": "speculative",
    "draft": "speculative",
    "drafted": "speculative",
    "drafts": "speculative",
    "spec": "speculative",
    "speculation": "speculative",
    "len": "tokens",
    "length": "tokens",
    "steps": "tokens",
    "token": "tokens",
    "max": "num",
    "number": "num",
    "vocabulary": "vocab",
    "heads": "model",
    "path": "model",
}


Count = Annotated[int, Field(ge=1, le=LARGEST)]
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
    num_speculative_tokens: Drafts = Field(
        3,
        description="drafts per request and step (default 3, or what the heads "
        "recommend; 5 with method lookup); with pipeline parallelism the worker "
        "group emits up to one token more per step",
    )
    exit_layer: tuple[int, ...] | None = Field(
        None,
        description="layer after which drafts are read (default: what the heads "
        "recommend, or half of the layers, on a GPU a quarter); with pipeline "
        "parallelism, the layer at which the stages are split, at least half of the "
        "layers",
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
    adaptive: bool = Field(
        True,
        description="draft as many tokens as pay off, or none, judged by the "
        "engine's acceptance counts and by step costs measured at start-up: all or "
        "none. false always drafts num_speculative_tokens, or the calibrated number "
        "for the batch size",
    )
    step_costs: Literal["cached", "measure"] = Field(
        "cached",
        description="cached: measure step costs (for adaptive) at the first start "
        "with a model, settings and machine, and keep them next to vLLM's compile "
        "cache; measure: measure them again, for instance after a change that makes "
        "the machine faster or slower",
    )
    prompt_lookup_min: Count | None = Field(
        None,
        le=LONGEST_LOOKUP,
        description="look first in each request's prompt and output: if at least "
        "this many of its last tokens have occurred there before, the tokens after "
        "them are the draft (default: no lookup, try 2; with method lookup 3)",
    )
    disable_by_batch_size: Count | None = Field(
        None,
        description="batch cut-off: in larger batches no request drafts (default: "
        "none; 8 with pipeline parallelism)",
    )

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"must be one of {', '.join(METHODS)}")
        return value

    @field_validator("exit_layer", mode="before")
    @classmethod
    def _ascending(cls, value: Any) -> tuple[int, ...] | None:
        """Accept 3, "3", "3,6", [3, 6]; store ascending and without repetition."""
        if value is None:
            return None
        layers = (
            value.split(",")
            if isinstance(value, str)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        try:
            if not all(
                type(layer) in (int, str) for layer in layers
            ):  # True is also an int
                raise TypeError
            ascending = tuple(sorted({int(layer) for layer in layers}))
        except (TypeError, ValueError):
            raise ValueError(
                "must be a layer number or a list of layer numbers, such as 6 or 4,8"
            ) from None
        if not ascending or ascending[0] < 1:
            raise ValueError(
                "must be at least 1, a number of layers after which the exit lies"
            )
        return ascending


def flag_fields() -> list[str]:
    """Fields that have a --ppd-... flag."""
    return [name for name in DraftingOptions.model_fields if name not in FLAGS_OF_VLLM]


def flag_name(field: str) -> str:
    return FLAGS_OF_VLLM.get(field) or "--ppd-" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to vLLM's parser, unless it has them already."""
    if "--speculative-model" in parser._option_string_actions:
        return parser
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
    method = parser._option_string_actions.get("--spec-method")
    if method is not None and method.choices is not None:
        method.choices = [*method.choices, *METHODS]
    for name in flag_fields():
        text = (DraftingOptions.model_fields[name].description or "").replace("%", "%%")
        group.add_argument(
            flag_name(name),
            dest=PREFIX + name,
            default=argparse.SUPPRESS,
            metavar=name.upper(),
            help=text,
        )
    for name in REMOVED:
        group.add_argument(
            flag_name(name),
            dest=PREFIX + name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return parser


def merge_flags(
    speculative_config: dict[str, Any] | None, args: argparse.Namespace
) -> dict[str, Any] | None:
    """vLLM's speculative_config with the values of our flags added.

    Raises:
        OptionError: if an option is given both ways or was removed, or a flag has a bad
            value.
    """
    flags = {
        name: getattr(args, PREFIX + name)
        for name in flag_fields()
        if hasattr(args, PREFIX + name)
    }
    for name, instead in REMOVED.items():
        if hasattr(args, PREFIX + name):
            raise OptionError(f"{flag_name(name)} was removed: {instead}")
    if not flags:
        return speculative_config
    merged = dict(check_mapping(speculative_config))
    spelt = {key.replace("-", "_"): key for key in merged}
    for name, text in flags.items():
        if name in spelt:
            raise OptionError(
                f"{flag_name(name)} and --speculative-config[{spelt[name]!r}] are "
                "mutually exclusive; give one"
            )
        try:
            merged[name] = getattr(
                DraftingOptions.model_validate({name: text}, strict=False), name
            )
        except ValidationError as error:
            raise OptionError(first_problem(error, flag_name)) from None
    return merged


def check_mapping(speculative_config: Any) -> dict[str, Any]:
    """vLLM's speculative_config, {} for None.

    Raises:
        OptionError: if it is not a dictionary with names as its keys.
    """
    given = {} if speculative_config is None else speculative_config
    if not isinstance(given, dict):
        raise OptionError(
            f"speculative_config={quoted(given)} is not a JSON object; give one, such as "
            '{"method": "ppd"}'
        )
    for key in given:
        if not isinstance(key, str):
            raise OptionError(
                f"speculative_config: option {quoted(key)} is not a name; write names "
                "as strings"
            )
    return given


def parse_options(options: Mapping[str, Any]) -> DraftingOptions:
    """Parse and check a speculative_config for one of our methods; None leaves an
    option out.

    Raises:
        OptionError: on the first problem, naming the option and, for an unknown one,
            the nearest known.
    """
    known = DraftingOptions.model_fields
    for key in options:
        if key in REMOVED:
            raise OptionError(f"speculative_config: {key} was removed: {REMOVED[key]}")
        if key not in known:
            near = nearest(str(key)[:LONGEST_NAME], known)
            hint = (
                f"did you mean {near!r}?"
                if near
                else f"known options: {', '.join(known)}"
            )
            raise OptionError(
                f"speculative_config: unknown option {quoted(key)}; {hint}"
            )
    try:
        parsed = DraftingOptions(
            **{key: value for key, value in options.items() if value is not None}
        )
    except ValidationError as error:
        raise OptionError(f"speculative_config: {first_problem(error)}") from None
    for key, value in options.items():
        methods = methods_of(key)
        if value is not None and parsed.method not in methods:
            raise OptionError(
                f"speculative_config: {key} is an option of method "
                f"{' and '.join(methods)}; leave it out with method {parsed.method!r}"
            )
    return parsed


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known option that an unknown name means, by its words or its letters; None if
    none is near.
    """

    def likeness(option: str) -> float:
        ours = _words(option)
        theirs = _words(name)
        by_words = len(ours & theirs) / len(ours | theirs)
        by_letters = difflib.SequenceMatcher(None, name.lower(), option).ratio()
        return max(by_words, by_letters)

    best = max(known, key=likeness)
    return best if likeness(best) >= LEAST_LIKENESS else None


def _words(name: str) -> set[str]:
    """The words of an option's name, of several for the same thing always the same one."""
    return {_SAME.get(word, word) for word in re.split(r"[_\W]+", name.lower())}


def methods_of(field: str) -> list[str]:
    """The methods that read an option: those whose records name it, or all."""
    return [
        name for name, method in METHODS.items() if field in method.options
    ] or list(METHODS)
