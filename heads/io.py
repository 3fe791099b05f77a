# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators format) and `model.safetensors`; nothing
in it is executed.

The config names the target and the sizes that the heads depend on, so a mismatch is
refused before a model loads. A name on the Hub may be given in place of a folder
(hub.py).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import ValidationError
from safetensors import safe_open
from typing_extensions import TypeVar

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import (
    check_is_folder,
    first_problem,
    named,
    read_json_object,
    write_tensors,
    write_text,
)
from vllm_ppd.heads.hub import (
    cached,
    folder_of,
    hub_name,
    pinned,
    remote_tensors,
    whole_folder,
)
from vllm_ppd.heads.kinds import KINDS, kind_in
from vllm_ppd.heads.measured import Parts
from vllm_ppd.heads.text import quoted
from vllm_ppd.heads.weight_files import (
    WEIGHTS_NAME,
    Stored,
    damage_in_a_line,
    stored_tensors,
)

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config", bound=HeadsConfig, default=HeadsConfig)
CONFIG_NAME = "config.json"
CALIBRATION_NAME = "calibration.json"
LONGEST_CONFIG = 1 << 20  # bytes
LONGEST_CALIBRATION = 16 << 20
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I32": "int32",
    "I64": "int64",
}


class _Place(NamedTuple):
    """Where a tensor is stored."""

    path: Path
    name: str  # in the file


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of heads that a folder's config names, or None if it names none of ours."""
    try:
        config = Path(folder_of(path, CONFIG_NAME)) / CONFIG_NAME
        return kind_in(read_json_object(config, LONGEST_CONFIG))
    except HeadsError:
        return None


def load_config(
    folder: str | os.PathLike[str], wanted: type[Config] | None = None
) -> Config:
    """Read and check `config.json`.

    Args:
        folder: of the heads, or their name on the Hub.
        wanted: refuse heads of any other class.

    Raises:
        HeadsError: if the folder or the file is missing, is of another kind, or lacks
            or mistypes a field.
    """
    folder = folder_of(folder, CONFIG_NAME)
    check_is_folder(folder)
    path = Path(folder) / CONFIG_NAME
    data = read_json_object(path, LONGEST_CONFIG)
    kind = kind_in(data)
    kinds = [
        name
        for name, config in KINDS.items()
        if issubclass(config, wanted or HeadsConfig)
    ]
    if kind is None or kind not in kinds:
        found = quoted(kind or data.get("speculators_model_type"))
        expected = ", ".join(map(repr, kinds))
        raise HeadsError(
            f"{named(path)} holds heads of kind {found}; expected kind {expected}"
        )
    try:
        return cast(Config, KINDS[kind].model_validate(data))
    except ValidationError as error:
        raise HeadsError(
            f"{named(path)}: {first_problem(error)}; correct it, or write the heads "
            "again"
        ) from None


def check_folder(folder: str | os.PathLike[str]) -> HeadsConfig:
    """Check a heads folder completely: its configuration, and every number of its
    weights.

    Raises:
        HeadsError: as load_tensors.
    """
    config, _ = load_tensors(folder)
    return config


def described(
    name: str | os.PathLike[str], *files: str
) -> tuple[str, HeadsConfig, bool]:
    """The configuration of heads, checked as far as is possible without fetching
    weights.

    Args:
        name: a folder, or a name on the Hub.
        files: further files to fetch if the heads have them.

    Returns:
        The folder with the configuration and these files; the configuration; whether
        the numbers of the weights were checked. For heads on the Hub whose weights are
        not in its cache, only names, shapes and dtypes are.

    Raises:
        HeadsError: as load_tensors.
    """
    name = pinned(name, CONFIG_NAME)
    folder = folder_of(name, CONFIG_NAME)
    config = load_config(folder)
    for file in (*files, *config.files_beside):
        with suppress(HeadsError):
            folder_of(name, file)
    if hub_name(name) is None or cached(name, WEIGHTS_NAME) is not None:
        return folder, check_folder(folder), True
    beside = [file for file in config.files_beside if Path(folder, file).exists()]
    stored = {
        tensor: Stored(Path(folder, file), shape, dtype)
        for tensor, (file, shape, dtype) in remote_tensors(name, beside).items()
    }
    _check_header(config, stored, Path(folder, WEIGHTS_NAME))
    return folder, config, False


def load_tensors(
    folder: str | os.PathLike[str], wanted: type[Config] | None = None
) -> tuple[Config, dict[str, torch.Tensor]]:
    """Load a heads folder and check it: its configuration, and the tensors that this
    names, mapped from the file.

    Raises:
        HeadsError: as load_config; if weights are missing or damaged; if a tensor is
            missing, has another shape or dtype, or holds non-finite numbers or
            impossible counts.
    """
    folder = whole_folder(folder)
    config = load_config(folder, wanted)
    whole = Path(folder, WEIGHTS_NAME)
    stored = stored_tensors(folder, config.files_beside)
    tensors: dict[str, torch.Tensor] = {}
    for name, place in _check_header(config, stored, whole).items():
        with (
            damage_in_a_line(place.path),
            safe_open(place.path, framework="pt") as file,
        ):
            tensor = file.get_tensor(place.name)
        if not config.is_count(name) and not tensor.isfinite().all():
            problem = f"tensor {quoted(place.name)} has numbers that are not finite"
            raise HeadsError(
                f"{named(place.path)}: {problem}; train or copy the heads again"
            )
        tensors[name] = tensor
    try:
        _check_counts(config, tensors)
    except ValueError as error:
        raise HeadsError(f"{named(whole)}: {error}; write the heads again") from None
    return config, tensors


def tensor_names(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the tensors of a folder's weights; empty if they cannot be read."""
    try:
        return list(stored_tensors(folder))
    except HeadsError:
        return []


def save_heads(
    folder: str | os.PathLike[str],
    config: HeadsConfig,
    tensors: dict[str, torch.Tensor],
) -> None:
    """Write a heads folder; each file is written atomically, the config last.

    Floating-point tensors are stored in the config's dtype.
    """
    import torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.dtype)
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / WEIGHTS_NAME, stored, {"format": "pt"})
    save_config(folder, config)


def save_config(folder: str | os.PathLike[str], config: HeadsConfig) -> None:
    """Write the configuration of heads whose weights exist already."""
    write_text(
        Path(folder) / CONFIG_NAME, json.dumps(config.to_json(), indent=2) + "\n"
    )


def parts_of(config: HeadsConfig, parts: Any, path: Path) -> Parts:
    """The parts of a calibration, typed by the kind of the heads.

    Raises:
        HeadsError: if one of them is missing or malformed.
    """
    try:
        return config.parts.model_validate(parts)
    except ValidationError as error:
        again = f"run `ppd calibrate {quoted(str(path.parent))} --data FILE` again"
        raise HeadsError(
            f"{named(path)}: parts.{first_problem(error)}; {again}"
        ) from None


def load_calibration(folder: str | os.PathLike[str]) -> Parts:
    """The parts of the finished calibration of a heads folder.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not finished, or malformed.
    """
    result = read_calibration(folder)
    return parts_of(
        load_config(folder), result.get("parts"), Path(folder) / CALIBRATION_NAME
    )


def read_calibration(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The finished calibration of a heads folder as it is stored, without a check of
    its parts.

    Raises:
        MissingFile, HeadsError: as load_calibration.
    """
    path = Path(folder) / CALIBRATION_NAME
    again = f"run `ppd calibrate {quoted(os.fspath(folder))} --data FILE`"
    unfinished = (
        f"heads in {quoted(os.fspath(folder))} have no finished calibration; {again}"
    )
    try:
        result = read_json_object(path, LONGEST_CALIBRATION, f"{again} again")
    except MissingFile:
        raise MissingFile(unfinished) from None
    if result.get("finished") is not True:
        raise HeadsError(unfinished)
    return result


def _check_header(
    config: HeadsConfig, stored: dict[str, Stored], whole: Path
) -> dict[str, _Place]:
    """Check the names, shapes and dtypes in the files' headers against the
    configuration.

    Args:
        config: of the heads.
        stored: the tensors by their names in the files.
        whole: the file to name if a tensor is missing.

    Returns:
        Where each tensor of the configuration is.

    Raises:
        HeadsError: on the first tensor that is missing, or has another shape or dtype.
    """
    places = {}
    for name, expected in config.shapes().items():
        found = [other for other in config.stored_names(name) if other in stored]
        if not found:
            raise HeadsError(
                f"{named(whole)} has no tensor {quoted(name)}; write the heads again"
            )
        path, shape, dtype = stored[found[0]]
        what = f"{named(path)}: tensor {quoted(found[0])}"
        if list(shape) != expected:
            raise HeadsError(f"{what} has shape {list(shape)}, expected {expected}")
        wanted = ("int32", "int64") if config.is_count(name) else config.dtypes
        dtype = DTYPES.get(dtype, dtype.lower())
        if dtype not in wanted:
            raise HeadsError(f"{what} is of {dtype}, expected {' or '.join(wanted)}")
        places[name] = _Place(path, found[0])
    return places


def _check_counts(config: HeadsConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Check counts and n-grams.

    Raises:
        ValueError: if no corpus can have them.
    """
    counts = {}
    for name, tensor in tensors.items():
        if not config.is_count(name):
            continue
        if tensor.numel() and int(tensor.min()) < 0:
            raise ValueError(f"counts in tensor {quoted(name)} are negative")
        counts[name] = tensor.numpy()
    config.check_counts(counts)
