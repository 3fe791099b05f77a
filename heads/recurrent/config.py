# SPDX-License-Identifier: Apache-2.0
"""Recurrent heads: `config.json` as IBM and Snowflake publish it, training options, and
what drafting costs.

Ours has their keys and speculators'. Theirs lacks the latter, and describes the target
by its hidden size and vocabulary size alone, until `ppd calibrate` adds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

from pydantic import AliasPath, ConfigDict, Field, model_validator

from vllm_ppd.heads.base import (
    MOST_DRAFTS,
    Drafts,
    Shapes,
    TargetLayers,
)
from vllm_ppd.heads.cp.config import ChainConfig, ChainOptions
from vllm_ppd.heads.text import quoted

ARCHITECTURES = tuple(
    f"{name}SpeculatorPreTrainedModel"
    for name in ("MLP", "ArcticMLP", "ArcticLSTM")
)
GATES = ("forget", "input", "output", "cell")
PREFIXES = ("", "speculator.")  # prefixes of tensor names
DTYPES = ("float32", "bfloat16", "float16")

# "4096" and [4096] are widths per layer, for a single layer
Width = int | str | list[int]


class PublishedTarget(TargetLayers):
    """The target as far as published heads describe it."""

    model_type: str = "not recorded"
    num_hidden_layers: int = Field(0, ge=0)  # 0: not recorded


class RecurrentOptions(ChainOptions):
    """`ppd train recurrent`: an MLP speculator in IBM's form, which starts as a linear
    prediction of states.
    """

    kind = "recurrent"

    inner_size: int | None = Field(
        None,
        ge=1,
        description="width of the state (default: twice the model's)",
    )
    tie_weights: bool = Field(
        True,
        description="all heads share their weights except the first projection",
    )
    scale_input: bool = Field(
        False,
        description="normalize the target's state first, as in some of IBM's heads",
    )
    start: Literal["ridge", "random"] = Field(
        "ridge",
        description="initial weights: a ridge regression of the target's later "
        "states, or random (IBM)",
    )


class RecurrentConfig(ChainConfig):
    """n heads, each with a state computed from the previous state and token."""

    # Keys that are not read here are left unchanged
    model_config = ConfigDict(extra="allow")
    kind = "recurrent"
    architecture = ARCHITECTURES[0]
    options = RecurrentOptions
    tensor_names = r"(speculator\.)?(emb\.0(\.0)?|forget_emb\.0)\.weight$"

    verifier: str = Field(
        "",
        validation_alias=AliasPath(
            "speculators_config", "verifier", "name_or_path"
        ),
        max_length=4096,
        description="name or path of the target; empty if not recorded",
    )
    target: PublishedTarget = Field(validation_alias="transformer_layer_config")
    form: Literal["sum_rnn", "sum_lstm"] = Field(
        "sum_rnn", validation_alias="method", description="MLP or LSTM"
    )
    n_predict: Drafts = Field(
        description=(
            "number of heads, which is the number of drafts they were trained for"
        )
    )
    vocab_size: int = Field(
        ge=1,
        description="tokens",
    )
    emb_dim: Width = Field(
        description="width of the target's states (IBM), or of embeddings (Arctic)"
    )
    inner_dim: Width = Field(0, description="width of the state (0: emb_dim)")
    input_hidden_dim: int | None = Field(
        None, ge=1, description="width of the target's states (Arctic)"
    )
    proj_dim: Width | None = Field(
        None, description="width of projections (Arctic)"
    )
    tie_weights: bool = Field(
        False,
        description="all heads share their weights except the first projection",
    )
    tie_lstm_embs: bool = Field(
        True, description="all gates of an LSTM share an embedding"
    )
    scale_input: bool = Field(
        False,
        description="the target's state is normalized and divided by sqrt(2)",
    )

    @classmethod
    def is_named_in(cls, data: dict[str, Any]) -> bool:
        if {"speculators_model_type", "speculators_config"} & data.keys():
            return super().is_named_in(data)
        names = data.get("architectures")
        return data.get("model_type") == "mlp_speculator" or (
            isinstance(names, list)
            and any(name in ARCHITECTURES for name in names)
        )

    @model_validator(mode="before")
    @classmethod
    def _published(cls, data: Any) -> Any:
        """Add the speculators' keys that published configurations lack."""
        if (
            not isinstance(data, dict)
            or {"speculators_config", "target"} & data.keys()
        ):
            return data
        size = (
            "emb_dim"
            if data.get("input_hidden_dim") is None
            else "input_hidden_dim"
        )
        for name in ("n_predict", "vocab_size", size):
            if type(data.get(name)) is not int:
                raise ValueError(
                    f"{name}={quoted(data.get(name))} is not an integer"
                )
        added = {
            "num_speculative_tokens": data["n_predict"],
            "transformer_layer_config": {
                "hidden_size": data[size],
                "vocab_size": data["vocab_size"],
            },
        }
        if isinstance(data.get("base_model_name_or_path"), str):
            added["verifier"] = data["base_model_name_or_path"]
        if data.get("torch_dtype") in DTYPES:
            added["dtype"] = data["torch_dtype"]
        return data | added

    @model_validator(mode="after")
    def _possible(self) -> RecurrentConfig:
        states = self.input_hidden_dim
        if states is None:
            states = _width("emb_dim", self.emb_dim)
        else:
            widths = {"emb_dim": self.emb_dim, "proj_dim": self.proj_dim}
            for name, width in widths.items():
                if width is not None and _width(name, width) != self.inner:
                    raise ValueError(
                        f"{name}={quoted(width)} must be inner_dim={self.inner}"
                    )
        target = self.target
        if states != target.hidden_size or self.vocab_size != target.vocab_size:
            raise ValueError(
                "the widths of states and vocabulary differ from "
                "transformer_layer_config"
            )
        if self.form == "sum_lstm" and not self.tie_weights:
            raise ValueError(
                "an LSTM whose heads do not share weights is not supported; "
                "tie_weights must be true"
            )
        return self

    @property
    def inner(self) -> int:
        """The width of the state."""
        return _width("inner_dim", self.inner_dim) or _width(
            "emb_dim", self.emb_dim
        )

    @property
    def gates(self) -> list[str]:
        """The prefixes of the projections' names."""
        return [f"{gate}_" for gate in GATES] if self.form == "sum_lstm" else [""]

    @property
    def embedding_gates(self) -> list[str]:
        """The prefixes of the embeddings' names."""
        return self.gates[:1] if self.tie_lstm_embs else self.gates

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of the norms, in the order in which they are applied."""
        return ("cell_ln", "state_ln") if self.form == "sum_lstm" else ("ln",)

    @property
    def stages(self) -> int:
        """The number of heads with separate weights."""
        return 1 if self.tie_weights else self.n_predict

    @property
    def projections(self) -> int:
        """The number of projections: the first reads the target's state, which may have
        another width.
        """
        return min(2, self.n_predict) if self.tie_weights else self.n_predict

    @property
    def dtypes(self) -> tuple[str, ...]:
        return DTYPES

    @property
    def max_drafts(self) -> int:
        """Tied heads may make more drafts than they were trained for."""
        return MOST_DRAFTS if self.tie_weights else self.n_predict

    def describe(self) -> str:
        form = "LSTM" if self.form == "sum_lstm" else "MLP"
        tied = ", tied" if self.tie_weights else ""
        return f"{self.n_predict} heads, {form} of {self.inner} numbers{tied}"

    def shapes(self) -> Shapes:
        width = self.inner
        table = [self.vocab_size, width]
        shapes: Shapes = {}
        for index in range(self.projections):
            read = self.target.hidden_size if index == 0 else width
            for gate in self.gates:
                shapes[f"{gate}proj.{index}.weight"] = [width, read]
        for stage in range(self.stages):
            for gate in self.embedding_gates:
                shapes[f"{gate}emb.{stage}.weight"] = table
            for norm, name in product(self.norms, ("weight", "bias")):
                shapes[f"{norm}.{stage}.{name}"] = [width]
            shapes[f"head.{stage}.weight"] = table
        return shapes | self.counts_shape()

    def stored_names(self, tensor: str) -> Iterator[str]:
        """Names with or without IBM's prefix, or as the first of several layers; for
        tied tensors any copy.
        """
        if self.is_count(tensor):
            yield tensor
            return
        group, index, name = tensor.split(".")
        last = "proj" not in group or index != "0"
        copies = self.n_predict if self.tie_weights and last else int(index) + 1
        indices = range(int(index), copies)
        for prefix, at, inner in product(PREFIXES, indices, ("", ".0")):
            yield f"{prefix}{group}.{at}{inner}.{name}"

    def work(self, drafts: int) -> tuple[float, float]:
        """Per draft an LM head of the state's width and a projection; an LSTM has a
        projection for each gate.
        """
        share = self.inner / self.target.hidden_size
        gates = len(GATES) if self.form == "sum_lstm" else 1
        return gates * (share + (drafts - 1) * share**2), drafts * share

    def to_json(self) -> dict[str, Any]:
        theirs = {
            "model_type": "mlp_speculator",
            "n_candidates": self.n_predict,
            "top_k_tokens_per_head": [1] * self.n_predict,
        }
        ours = super().to_json()
        return theirs | {"method": ours.pop("form")} | ours


def _width(name: str, value: Width) -> int:
    """A width, which may be written as a list of layers with a single entry.

    Raises:
        ValueError: if it has several layers, or is no number.
    """
    layers = value if isinstance(value, list) else str(value).split(".")
    if len(layers) != 1:
        raise ValueError(
            f"{name}={quoted(value)} has {len(layers)} layers; only heads with one "
            "layer are supported"
        )
    if not str(layers[0]).isdecimal() or int(layers[0]) > 1 << 20:
        raise ValueError(f"{name}={quoted(value)} is not a width")
    return int(layers[0])
