# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`; nothing in it is ever executed.

The config names the target and what of it the heads depend on, so that a mismatch is refused before a model loads.
Whoever takes a heads folder comes through here: the server, however it is named, and every command of `ppd`. Where a
folder is wanted, a name on the Hub does as well (hub.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError
from typing_extensions import TypeVar

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import check_is_folder, first_problem, named, read_json_object
from vllm_ppd.heads.hub import cached, folder_of, hub_name, pinned, remote_tensors
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.layout import TargetFingerprint
from vllm_ppd.heads.measured import Parts
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.weights import CONFIG_NAME, WEIGHTS_NAME, check_header, check_weights, read_weights

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config", bound=HeadsConfig, default=HeadsConfig)
CALIBRATION_NAME = "calibration.json"
LONGEST_CONFIG, LONGEST_CALIBRATION = 1 << 20, 16 << 20  # bytes


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


def parts_of(config: HeadsConfig, parts: Any, path: Path) -> Parts:
    """The parts of a calibration, typed by the kind of the heads.

    Raises:
        HeadsError: if one of them is missing or of another shape.
    """
    try:
        return config.parts.model_validate(parts, context={"num_layers": config.target.num_hidden_layers})
    except ValidationError as error:
        again = f"run `ppd calibrate {quoted(str(path.parent))} --data FILE` again"
        raise HeadsError(f"{named(path)}: parts.{first_problem(error)}; {again}") from None


def load_calibration(folder: str | os.PathLike[str]) -> Parts:
    """What the finished calibration of a heads folder measured.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not finished, or of another shape.
    """
    result = read_calibration(folder)
    return parts_of(load_config(folder), result.get("parts"), Path(folder) / CALIBRATION_NAME)


def read_calibration(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The finished calibration of a heads folder as it is stored; its parts are not checked.

    Raises:
        MissingFile, HeadsError: as load_calibration.
    """
    path, again = Path(folder) / CALIBRATION_NAME, f"run `ppd calibrate {quoted(os.fspath(folder))} --data FILE`"
    unfinished = f"heads in {quoted(os.fspath(folder))} have no finished calibration; {again}"
    try:
        result = read_json_object(path, LONGEST_CALIBRATION, f"{again} again")
    except MissingFile:
        raise MissingFile(unfinished) from None
    if result.get("finished") is not True:
        raise HeadsError(unfinished)
    return result
