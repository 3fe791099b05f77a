# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`; nothing in it is ever executed.

The config names the target and what of it the heads depend on, so that a mismatch is refused before a model loads.
Whoever takes a heads folder comes through here: the server, however it is named, and every command of `ppd`. Where a
folder is wanted, a name on the Hub does as well (hub.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError
from typing_extensions import TypeVar

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import check_is_folder, named, read_json_object, write_tensors, write_text
from vllm_ppd.heads.hub import cached, folder_of, hub_name, pinned, remote_tensors
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.layout import TargetFingerprint
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened
from vllm_ppd.heads.weights import WEIGHTS_NAME, check_header, check_weights, read_weights

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONFIG_NAME", "WEIGHTS_NAME", "HeadsError", "check_folder", "check_target", "described", "kind_of",
    "load_config", "load_tensors", "save_heads", "write_tensors", "write_text",
]  # fmt: skip

Config = TypeVar("Config", bound=HeadsConfig, default=HeadsConfig)
CONFIG_NAME = "config.json"
LONGEST_CONFIG = 1 << 20  # bytes


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of heads that a folder's config names, or None if it names none of ours."""
    try:
        config = Path(folder_of(path, CONFIG_NAME)) / CONFIG_NAME
        kind = read_json_object(config, LONGEST_CONFIG).get("speculators_model_type")
    except HeadsError:
        return None
    return kind if isinstance(kind, str) and kind in KINDS else None


def load_config(folder: str | os.PathLike[str], wanted: type[Config] | None = None) -> Config:
    """Read and check `config.json`.

    Args:
        folder: the heads folder.
        wanted: refuse heads of any other class.

    Raises:
        HeadsError: if the folder or the file is missing or of another sort, is not a JSON object, is of another kind,
            or lacks or mistypes a field.
    """
    folder = folder_of(folder, CONFIG_NAME)
    check_is_folder(folder)
    path = Path(folder) / CONFIG_NAME
    data = read_json_object(path, LONGEST_CONFIG)
    kind = data.get("speculators_model_type")
    kinds = [name for name, config in KINDS.items() if issubclass(config, wanted or HeadsConfig)]
    if kind not in kinds:
        expected = ", ".join(map(repr, kinds))
        raise HeadsError(f"{named(path)} holds heads of kind {quoted(kind)}; expected kind {expected}")
    try:
        config = HeadsConfig.from_json(data)
    except ValidationError as error:
        raise HeadsError(f"{named(path)}: {first_problem(error)}; correct it, or write the heads again") from None
    return cast(Config, config)


def check_folder(folder: str | os.PathLike[str]) -> HeadsConfig:
    """Check all of a heads folder: its configuration, and every number of its weights.

    Raises:
        HeadsError: as load_tensors.
    """
    name = pinned(folder, CONFIG_NAME)
    config = load_config(name)
    check_weights(config, folder_of(name, CONFIG_NAME, WEIGHTS_NAME))
    return config


def described(name: str | os.PathLike[str], *files: str) -> tuple[str, HeadsConfig, bool]:
    """Heads as far as they can be told without fetching weights.

    Args:
        name: a folder, or a name on the Hub.
        files: further files that are wanted, where the heads have them.

    Returns:
        The folder with the configuration and these files; the configuration; whether the numbers of the weights were
        checked, or, of heads on the Hub whose weights are not in its cache, names, shapes and dtypes alone.

    Raises:
        HeadsError: as check_folder.
    """
    name = pinned(name, CONFIG_NAME)
    folder = folder_of(name, CONFIG_NAME, also=files)
    if hub_name(name) is None or cached(name, WEIGHTS_NAME) is not None:
        return folder, check_folder(folder), True
    config = load_config(folder)
    check_header(config, remote_tensors(name, WEIGHTS_NAME), Path(folder) / WEIGHTS_NAME)
    return folder, config, False


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
    other = f"heads in {quoted(str(folder))} were made for another target ({quoted(config.verifier)})"
    for field, value in ours.items():
        trained_for = getattr(config.target, field)
        if trained_for != value:
            raise HeadsError(
                f"{other}: {field} is {trained_for} there and {value} in this model; use the heads of this model"
            )
    if difference := config.fingerprint.difference(fingerprint):
        raise HeadsError(f"{other}: {difference}; use the heads of this model")


def load_tensors(
    folder: str | os.PathLike[str],
    wanted: type[Config] | None = None,
) -> tuple[Config, dict[str, torch.Tensor]]:
    """Load a checked heads folder: its configuration and its tensors by name.

    Raises:
        HeadsError: as load_config and weights.read_weights.
    """
    name = pinned(folder, CONFIG_NAME)
    config = load_config(name, wanted)
    return config, read_weights(config, folder_of(name, CONFIG_NAME, WEIGHTS_NAME))


def save_heads(folder: str | os.PathLike[str], config: HeadsConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a heads folder; each file appears whole or not at all, the config last.

    Floating-point tensors are stored in the config's dtype.
    """
    import torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.dtype)
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / WEIGHTS_NAME, stored, {"format": "pt"})
    write_text(folder / CONFIG_NAME, json.dumps(config.to_json(), indent=2) + "\n")


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's problems in one line: which field, and what is wrong with it."""
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    place = shortened(".".join(str(part) for part in problem["loc"]), LONGEST_VALUE)
    return f"{place}: {shortened(message, 120)}" if place else shortened(message, 120)
