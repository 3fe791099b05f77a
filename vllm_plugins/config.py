# SPDX-License-Identifier: Apache-2.0
"""Our options, declared once: the command-line flags, the documentation and the errors come from here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

# Where our resolved options travel inside VllmConfig.additional_config.
CONFIG_KEY = "vllm_ppd"
METHODS = ("ppd", "paradecode")


class OptionError(ValueError):
    """A bad option; the message is one line: what, where, what to do instead."""


class DraftingOptions(BaseModel):
    """Options of the drafting methods, as given by the user.

    They come as keys of --speculative-config / speculative_config, or as --ppd-... flags (the fields marked so).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: Literal["ppd", "paradecode"] = Field(
        "ppd",
        description="drafting method; both names run early drafting with deferred KV completion",
    )
    model: str | None = Field(
        None,
        description="heads folder; without one the exit is read through the target's own final norm and LM head",
    )
    num_speculative_tokens: int = Field(
        3,
        ge=1,
        le=16,
        description="drafts per request and step (default 3, or what the heads recommend)",
    )
    exit_layer: tuple[int, ...] | None = Field(
        None,
        description="layer after which drafts are read, or several such layers: the earliest whose confidence "
        "exceeds gamma is taken (default: what the heads recommend, or the middle of the model)",
        json_schema_extra={"flag": True},
    )
    gamma: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="confidence a draft must exceed (ParaDecode, eq. 1); at 0 every draft is made",
        json_schema_extra={"flag": True},
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "probabilistic",
        description="how drafts of sampling requests are drawn: the exit's best token (greedy), or a sample whose "
        "distribution q(x) the rejection sampler is given; the output distribution is the target's either way",
        json_schema_extra={"flag": True},
    )
    max_drafting_requests: int | None = Field(
        None,
        ge=1,
        description="soft batch cut-off: only the first so many requests of a batch draft",
        json_schema_extra={"flag": True},
    )
    disable_by_batch_size: int | None = Field(
        None,
        ge=1,
        description="hard batch cut-off: in batches of more requests than this none drafts",
        json_schema_extra={"flag": True},
    )

    @field_validator("exit_layer", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """Accept 3, "3", "3,6", [3, 6]; store ascending and without repetition."""
        if value is None:
            return None
        if isinstance(value, str):
            value = value.replace(" ", "").split(",")
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        try:
            return tuple(sorted({int(layer) for layer in value if not isinstance(layer, bool | float)}))
        except (TypeError, ValueError):
            raise ValueError("must be a layer number or a list of layer numbers, such as 6 or 4,8") from None

    @field_validator("exit_layer")
    @classmethod
    def _positive(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or value[0] < 1):
            raise ValueError("layers count from 1; the exit lies after that many layers")
        return value


class DraftingConfig(DraftingOptions):
    """The options as resolved for one target: exit layers are known and within the model."""

    exit_layer: tuple[int, ...]
    num_layers: int

    def summary(self) -> str:
        """The start-up line: what drafts, from which layer, with which heads."""
        exits = "/".join(str(layer) for layer in self.exit_layer)
        heads = f"heads {self.model}" if self.model else "no heads (final norm and LM head of the target)"
        soft = f"first {self.max_drafting_requests} requests" if self.max_drafting_requests else "none"
        hard = f"above {self.disable_by_batch_size} requests" if self.disable_by_batch_size else "none"
        return (
            f"drafting with method {self.method}: exit layer {exits} of {self.num_layers}, {heads}, "
            f"{self.num_speculative_tokens} drafts ({self.draft_sample_method}), gamma {self.gamma:g}, "
            f"batch cut-offs: soft {soft}, hard {hard}"
        )


def flag_fields() -> list[str]:
    """Fields that have a --ppd-... flag of their own."""
    return [
        name
        for name, field in DraftingOptions.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("flag")
    ]


def flag_name(field: str) -> str:
    return "--ppd-" + field.replace("_", "-")


def parse_options(options: Mapping[str, Any]) -> DraftingOptions:
    """Check a speculative_config of ours.

    Raises:
        OptionError: on the first problem, naming the option and, for an unknown one, the nearest known.
    """
    known = DraftingOptions.model_fields
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise OptionError(f"speculative_config: unknown option {key!r}; {hint}")
    try:
        return DraftingOptions(**options)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"]) or "options"
        message = problem["msg"].removeprefix("Value error, ")
        raise OptionError(f"speculative_config: {name}={problem['input']!r}: {message}") from None


def resolve(
    options: DraftingOptions,
    num_layers: int,
    heads_exits: tuple[int, ...] | None = None,
    default_exits: tuple[int, ...] | None = None,
    heads_drafts: int | None = None,
) -> DraftingConfig:
    """Fill what depends on the target (L layers) and on the heads: exits that have one, default exits, drafts.

    Raises:
        OptionError: if an exit layer is outside 1..L-1 or has no head in a given heads folder.
    """
    exits = options.exit_layer or default_exits or (max(1, num_layers // 2),)
    outside = [layer for layer in exits if not 1 <= layer < num_layers]
    if outside:
        raise OptionError(
            f"speculative_config: exit_layer={outside[0]} is outside 1..{num_layers - 1}; "
            f"this model has {num_layers} layers"
        )
    headless = [layer for layer in exits if heads_exits is not None and layer not in heads_exits]
    if headless:
        raise OptionError(
            f"speculative_config: exit_layer={headless[0]} has no head in {options.model!r}, "
            f"which has heads for layers {', '.join(map(str, heads_exits or ()))}"
        )
    values = options.model_dump()
    if heads_drafts is not None and "num_speculative_tokens" not in options.model_fields_set:
        values["num_speculative_tokens"] = heads_drafts
    return DraftingConfig(**{**values, "exit_layer": exits, "num_layers": num_layers})


def options_table() -> str:
    """The options as a Markdown table, for the documentation."""
    lines = ["| option | flag | default | meaning |", "| --- | --- | --- | --- |"]
    flags = set(flag_fields())
    own = {"method": "--spec-method", "model": "--spec-model", "num_speculative_tokens": "--spec-tokens"}
    for name, field in DraftingOptions.model_fields.items():
        flag = flag_name(name) if name in flags else own[name]
        default = "none" if field.default is None else field.default
        lines.append(f"| `{name}` | `{flag}` | {default} | {field.description} |")
    return "\n".join(lines)
