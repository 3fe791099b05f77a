# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`; nothing in it is ever executed.

The config names the target and the sizes that the heads depend on, so a mismatch is refused before a model loads.
The server and every command of `ppd` read heads folders through this module. A name on the Hub may be given in place
of a folder (hub.py).

Tensors stay mapped from the file, and each is read once to check that it is finite: 0.02 s for 270 MB of
bfloat16 in the page cache, on one core.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError
from safetensors import safe_open
from typing_extensions import TypeVar

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import check_is_folder, first_problem, named, read_json_object, write_tensors, write_text
from vllm_ppd.heads.hub import cached, folder_of, hub_name, pinned
from vllm_ppd.heads.kinds import KINDS, kind_in
from vllm_ppd.heads.measured import Parts
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.raw_tensors import raw_tensors
from vllm_ppd.heads.weight_files import (
    WEIGHTS_NAME,
    Stored,
    damage_in_a_line,
    remote_tensors,
    stored_tensors,
    with_weights,
)

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config", bound=HeadsConfig, default=HeadsConfig)
CONFIG_NAME, CALIBRATION_NAME = "config.json", "calibration.json"
LONGEST_CONFIG, LONGEST_CALIBRATION = 1 << 20, 16 << 20  # bytes
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "int32", "I64": "int64"}


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of heads that a folder's config names, or None if it names none of ours."""
    try:
        config = Path(folder_of(path, CONFIG_NAME)) / CONFIG_NAME
        return kind_in(read_json_object(config, LONGEST_CONFIG))
    except HeadsError:
        return None


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
    kind = kind_in(data)
    kinds = [name for name, config in KINDS.items() if issubclass(config, wanted or HeadsConfig)]
    if kind not in kinds:
        expected = ", ".join(map(repr, kinds))
        kind = kind or data.get("speculators_model_type")
        raise HeadsError(f"{named(path)} holds heads of kind {quoted(kind)}; expected kind {expected}")
    try:
        return cast(Config, KINDS[kind].model_validate(data))
    except ValidationError as error:
        raise HeadsError(f"{named(path)}: {first_problem(error)}; correct it, or write the heads again") from None


def check_folder(folder: str | os.PathLike[str]) -> HeadsConfig:
    """Check a heads folder completely: its configuration, and every number of its weights.

    Raises:
        HeadsError: as load_tensors.
    """
    name = pinned(folder, CONFIG_NAME)
    config = load_config(name)
    _check_weights(config, with_weights(name, CONFIG_NAME, config.files_beside))
    return config


def described(name: str | os.PathLike[str], *files: str) -> tuple[str, HeadsConfig, bool]:
    """The configuration of heads, checked as far as is possible without fetching weights.

    Args:
        name: a folder, or a name on the Hub.
        files: further files to fetch if the heads have them.

    Returns:
        The folder with the configuration and these files; the configuration; whether the numbers of the weights were
        checked (for heads on the Hub whose weights are not in its cache, only names, shapes and dtypes are).

    Raises:
        HeadsError: as check_folder.
    """
    name = pinned(name, CONFIG_NAME)
    folder = folder_of(name, CONFIG_NAME, also=files)
    if hub_name(name) is None or cached(name, WEIGHTS_NAME) is not None:
        return folder, check_folder(folder), True
    config = load_config(folder)
    _check_header(config, remote_tensors(name, folder, config.files_beside), Path(folder) / WEIGHTS_NAME)
    return folder, config, False


def load_tensors(
    folder: str | os.PathLike[str], wanted: type[Config] | None = None
) -> tuple[Config, dict[str, torch.Tensor]]:
    """Load a heads folder and check it: its configuration, and the tensors that this names, mapped from the file.

    Raises:
        HeadsError: as load_config; if weights are missing, truncated, a pickle or not regular; if a tensor is missing,
            has another shape or dtype, or holds non-finite numbers or impossible counts.
    """
    name = pinned(folder, CONFIG_NAME)
    config = load_config(name, wanted)
    tensors: dict[str, torch.Tensor] = {}
    for path, names in _check_weights(config, with_weights(name, CONFIG_NAME, config.files_beside)).items():
        with safe_open(path, framework="pt") as file:
            tensors |= {tensor: file.get_tensor(stored) for stored, tensor in names.items()}
    return config, tensors


def tensor_names(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the tensors of a folder's weights; empty if they cannot be read."""
    try:
        return list(stored_tensors(folder))
    except HeadsError:
        return []


def save_heads(folder: str | os.PathLike[str], config: HeadsConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a heads folder; each file is written atomically, the config last.

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
    save_config(folder, config)


def save_config(folder: str | os.PathLike[str], config: HeadsConfig) -> None:
    """Write the configuration of heads whose weights exist already."""
    write_text(Path(folder) / CONFIG_NAME, json.dumps(config.to_json(), indent=2) + "\n")


def parts_of(config: HeadsConfig, parts: Any, path: Path) -> Parts:
    """The parts of a calibration, typed by the kind of the heads.

    Raises:
        HeadsError: if one of them is missing or malformed.
    """
    try:
        return config.parts.model_validate(parts, context={"num_layers": config.target.num_hidden_layers})
    except ValidationError as error:
        again = f"run `ppd calibrate {quoted(str(path.parent))} --data FILE` again"
        raise HeadsError(f"{named(path)}: parts.{first_problem(error)}; {again}") from None


def load_calibration(folder: str | os.PathLike[str]) -> Parts:
    """The parts of the finished calibration of a heads folder.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not finished, or malformed.
    """
    result = read_calibration(folder)
    return parts_of(load_config(folder), result.get("parts"), Path(folder) / CALIBRATION_NAME)


def read_calibration(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The finished calibration of a heads folder as it is stored, without a check of its parts.

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


def _check_weights(config: HeadsConfig, folder: str | os.PathLike[str]) -> dict[Path, dict[str, str]]:
    """Check every number of the tensors that the configuration names (load_tensors); returns their names by file."""
    whole = Path(folder) / WEIGHTS_NAME
    places = _check_header(config, stored_tensors(folder, config.files_beside), whole)
    counts = {}
    for path, names in places.items():
        with damage_in_a_line(path):
            tensors = raw_tensors(path, names)
        for stored, tensor in tensors.items():
            if config.is_count(names[stored]):
                counts[names[stored]] = tensor.bits
            elif not tensor.is_finite:
                problem = f"tensor {quoted(stored)} has numbers that are not finite"
                raise HeadsError(f"{named(path)}: {problem}; train or copy the heads again")
    try:
        for name, numbers in counts.items():
            if numbers.size and int(numbers.min()) < 0:
                raise ValueError(f"counts in tensor {quoted(name)} are negative")
        config.check_counts(counts)
    except ValueError as error:
        raise HeadsError(f"{named(whole)}: {error}; write the heads again") from None
    return places


def _check_header(config: HeadsConfig, tensors: dict[str, Stored], whole: Path) -> dict[Path, dict[str, str]]:
    """Check the names, shapes and dtypes in the files' headers against the configuration; returns as _check_weights.

    `whole` is the file to name if a tensor is missing.
    """
    places: dict[Path, dict[str, str]] = {}
    for name, expected in config.shapes().items():
        stored = next((stored for stored in config.stored_names(name) if stored in tensors), None)
        if stored is None:
            raise HeadsError(f"{named(whole)} has no tensor {quoted(name)}; write the heads again")
        path, shape, dtype = tensors[stored]
        if list(shape) != expected:
            raise HeadsError(f"{named(path)}: tensor {quoted(stored)} has shape {list(shape)}, expected {expected}")
        wanted = ("int32", "int64") if config.is_count(name) else config.dtypes
        dtype = DTYPES.get(dtype, dtype.lower())
        if dtype not in wanted:
            problem = f"tensor {quoted(stored)} is of {dtype}, expected {' or '.join(wanted)}"
            raise HeadsError(f"{named(path)}: {problem}; write the heads again")
        places.setdefault(path, {})[stored] = name
    return places
