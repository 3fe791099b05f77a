# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`, nothing else and never code.

The config names the target and what of it the heads depend on, so that a mismatch is refused before a model loads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_ppd.heads.early import EarlyHeads
from vllm_ppd.heads.fingerprint import TargetFingerprint

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
ALGORITHM = "early"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


class HeadsError(ValueError):
    """A heads folder that cannot be used; the message is one line: what, where, what to do instead."""


class TargetLayers(BaseModel):
    """What the heads need to know of the target; speculators calls it `transformer_layer_config`."""

    model_config = ConfigDict(extra="allow")
    model_type: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=2)


class HeadsConfig(BaseModel):
    """`config.json` of a heads folder."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    speculators_model_type: Literal["early"] = Field("early", description="the algorithm; speculators' own key")
    architectures: list[str] = ["EarlyHeads"]
    verifier: str = Field(description="name or path of the target")
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="drafts a step recommended for these heads")
    exit_layers: list[int] = Field(min_length=1, description="exit layers that have a head")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    target: TargetLayers
    fingerprint: TargetFingerprint = TargetFingerprint()

    def to_json(self) -> dict[str, Any]:
        """The dictionary in speculators' layout."""
        return {
            "architectures": self.architectures,
            "speculators_model_type": self.speculators_model_type,
            "speculators_config": {
                "algorithm": self.speculators_model_type,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.num_speculative_tokens},
                ],
                "verifier": {"name_or_path": self.verifier, "architectures": []},
            },
            "transformer_layer_config": self.target.model_dump(),
            "exit_layers": self.exit_layers,
            "dtype": self.dtype,
            "fingerprint": self.fingerprint.model_dump(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadsConfig:
        speculators = data.get("speculators_config") or {}
        methods = speculators.get("proposal_methods") or [{}]
        return cls(
            speculators_model_type=data.get("speculators_model_type"),  # type: ignore[arg-type]
            architectures=data.get("architectures", ["EarlyHeads"]),
            verifier=(speculators.get("verifier") or {}).get("name_or_path"),  # type: ignore[arg-type]
            num_speculative_tokens=methods[0].get("speculative_tokens", 3),
            exit_layers=data.get("exit_layers"),  # type: ignore[arg-type]
            dtype=data.get("dtype", "float32"),
            target=data.get("transformer_layer_config"),  # type: ignore[arg-type]
            fingerprint=data.get("fingerprint") or {},  # type: ignore[arg-type]
        )


def is_heads_folder(path: str | os.PathLike[str]) -> bool:
    """Whether the folder's config says that it holds heads of ours."""
    try:
        data = json.loads((Path(path) / CONFIG_NAME).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("speculators_model_type") == ALGORITHM


def load_config(folder: str | os.PathLike[str]) -> HeadsConfig:
    """Read and check `config.json`.

    Raises:
        HeadsError: if the folder or the file is missing, is not JSON, or lacks or mistypes a field.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadsError(f"heads folder {str(folder)!r} does not exist; give a folder with {CONFIG_NAME}, or no heads")
    path = folder / CONFIG_NAME
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise HeadsError(f"heads folder {str(folder)!r} has no {CONFIG_NAME}; is this the right folder?") from None
    except ValueError as error:
        raise HeadsError(f"{path} is not valid JSON ({error}); write the heads again") from None
    kind = data.get("speculators_model_type") if isinstance(data, dict) else None
    if kind != ALGORITHM:
        raise HeadsError(f"{path} holds heads of kind {kind!r}; this method reads kind {ALGORITHM!r}")
    try:
        return HeadsConfig.from_json(data)
    except (ValidationError, AttributeError, TypeError, IndexError) as error:
        raise HeadsError(f"{path}: {_first_problem(error)}") from None


def check_target(
    config: HeadsConfig,
    folder: str | os.PathLike[str],
    *,
    hidden_size: int,
    vocab_size: int,
    num_hidden_layers: int,
    fingerprint: TargetFingerprint,
) -> None:
    """Refuse heads of another target, naming the field that differs.

    Fingerprints are compared where both sides have one (a target that is not on this disk yet has none).

    Raises:
        HeadsError: on the first difference.
    """
    theirs, ours = (
        config.target,
        {
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "num_hidden_layers": num_hidden_layers,
        },
    )
    for field, value in ours.items():
        trained_for = getattr(theirs, field)
        if trained_for != value:
            raise HeadsError(
                f"heads in {str(folder)!r} were made for another target ({config.verifier}): "
                f"{field} is {trained_for} there and {value} in this model; use the heads of this model"
            )
    for field in ("tokenizer", "lm_head"):
        trained_for, value = getattr(config.fingerprint, field), getattr(fingerprint, field)
        if trained_for and value and trained_for != value:
            raise HeadsError(
                f"heads in {str(folder)!r} were made for another target ({config.verifier}): "
                f"the hash of its {field} differs; use the heads of this model"
            )


def check_weights(config: HeadsConfig, folder: str | os.PathLike[str]) -> None:
    """Check names and shapes of `model.safetensors` by its header, without reading the tensors.

    Raises:
        HeadsError: if the file is missing, truncated, a pickle, or lacks or misshapes a tensor.
    """
    path = Path(folder) / WEIGHTS_NAME
    if not path.exists():
        pickles = sorted(p.name for p in Path(folder).iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise HeadsError(
                f"heads folder {str(folder)!r} holds {pickles[0]}, a pickle, which is never loaded; "
                f"save the heads as {WEIGHTS_NAME}"
            )
        raise HeadsError(f"heads folder {str(folder)!r} has no {WEIGHTS_NAME}; write the heads again")
    size = config.target.hidden_size
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise HeadsError(f"{path} is truncated or not safetensors ({error}); copy or write the heads again") from None
    for layer in config.exit_layers:
        name = f"exit.{layer}.transform"
        if name not in shapes:
            raise HeadsError(f"{path} has no tensor {name!r} for exit layer {layer}; write the heads again")
        if shapes[name] != [size, size]:
            raise HeadsError(f"{path}: tensor {name!r} has shape {shapes[name]}, expected [{size}, {size}]")


def load_heads(folder: str | os.PathLike[str]) -> tuple[HeadsConfig, EarlyHeads]:
    """Load a checked heads folder.

    Raises:
        HeadsError: as load_config and check_weights.
    """
    config = load_config(folder)
    check_weights(config, folder)
    with safe_open(Path(folder) / WEIGHTS_NAME, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return config, EarlyHeads.from_tensors(tensors, config.exit_layers, config.target.hidden_size)


def save_heads(folder: str | os.PathLike[str], config: HeadsConfig, heads: EarlyHeads) -> None:
    """Write a heads folder; each file appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.dtype)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in heads.tensors().items()}
    weights, settings = folder / WEIGHTS_NAME, folder / CONFIG_NAME
    save_file(tensors, weights.with_suffix(".part"), metadata={"format": "pt"})
    os.replace(weights.with_suffix(".part"), weights)
    settings.with_suffix(".part").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    os.replace(settings.with_suffix(".part"), settings)


def _first_problem(error: Exception) -> str:
    """The first of pydantic's problems in one line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return f"the layout is not that of a heads folder ({error})"
