# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`; nothing in it is ever executed.

The config names the target and what of it the heads depend on, so that a mismatch is refused before a model loads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_ppd.heads.config import KINDS, EarlyConfig, HeadsConfig
from vllm_ppd.heads.early import EarlyHeads
from vllm_ppd.heads.fingerprint import TargetFingerprint

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


class HeadsError(ValueError):
    """A heads folder that cannot be used; the message is one line: what, where, what to do instead."""


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of heads that a folder's config names, or None if it names none of ours."""
    try:
        data = json.loads((Path(path) / CONFIG_NAME).read_text())
    except (OSError, ValueError):
        return None
    kind = data.get("speculators_model_type") if isinstance(data, dict) else None
    return kind if kind in KINDS else None


def load_config(folder: str | os.PathLike[str], kind: str | None = None) -> HeadsConfig:
    """Read and check `config.json`.

    Args:
        folder: the heads folder.
        kind: refuse heads of any other kind.

    Raises:
        HeadsError: if the folder or the file is missing, is not JSON, is of another kind, or lacks or mistypes a field.
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
    found = data.get("speculators_model_type") if isinstance(data, dict) else None
    if found not in KINDS or kind not in (None, found):
        wanted = repr(kind) if kind is not None else ", ".join(map(repr, KINDS))
        raise HeadsError(f"{path} holds heads of kind {found!r}; expected kind {wanted}")
    try:
        return HeadsConfig.from_json(data)
    except (ValidationError, AttributeError, TypeError, IndexError) as error:
        raise HeadsError(f"{path}: {first_problem(error)}") from None


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
    ours = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": num_hidden_layers}
    other = f"heads in {str(folder)!r} were made for another target ({config.verifier})"
    for field, value in ours.items():
        trained_for = getattr(config.target, field)
        if trained_for != value:
            raise HeadsError(
                f"{other}: {field} is {trained_for} there and {value} in this model; use the heads of this model"
            )
    if difference := config.fingerprint.difference(fingerprint):
        raise HeadsError(f"{other}: {difference}; use the heads of this model")


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
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise HeadsError(f"{path} is truncated or not safetensors ({error}); copy or write the heads again") from None
    for name, expected in config.shapes().items():
        if name not in shapes:
            raise HeadsError(f"{path} has no tensor {name!r}; write the heads again")
        if shapes[name] != expected:
            raise HeadsError(f"{path}: tensor {name!r} has shape {shapes[name]}, expected {expected}")


def load_tensors(folder: str | os.PathLike[str], kind: str | None = None) -> tuple[HeadsConfig, dict[str, Any]]:
    """Load a checked heads folder: its configuration and its tensors by name.

    Raises:
        HeadsError: as load_config and check_weights.
    """
    config = load_config(folder, kind)
    check_weights(config, folder)
    with safe_open(Path(folder) / WEIGHTS_NAME, framework="pt") as file:
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load_early_heads(folder: str | os.PathLike[str]) -> tuple[EarlyConfig, EarlyHeads]:
    """Load a folder of early heads.

    Raises:
        HeadsError: as load_tensors.
    """
    config, tensors = load_tensors(folder, EarlyConfig.kind)
    assert isinstance(config, EarlyConfig)
    return config, EarlyHeads.from_tensors(tensors, config.exit_layers, config.head)


def save_heads(folder: str | os.PathLike[str], config: HeadsConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a heads folder; each file appears whole or not at all, the config last.

    Floating-point tensors are stored in the config's dtype.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.dtype)
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / WEIGHTS_NAME, stored, {"format": "pt"})
    write_text(folder / CONFIG_NAME, json.dumps(config.to_json(), indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        OSError: if it cannot be written; a file that was there stays as it was.
    """
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, metadata=metadata)
        os.chmod(part, 0o644)  # safetensors writes for the owner alone; a server runs as another user
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def first_problem(error: Exception) -> str:
    """The first of pydantic's problems in one line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        return ": ".join(part for part in (".".join(str(part) for part in problem["loc"]), message) if part)
    return f"the layout is not that of a heads folder ({error})"
