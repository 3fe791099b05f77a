# SPDX-License-Identifier: Apache-2.0
"""The heads folder: `config.json` (speculators' layout, read by vllm-ppd), and
`model.safetensors` or the shards of an index; nothing in it is executed.

The config names the target and the sizes that the heads depend on, so a mismatch is
refused before a model loads. A name on the Hub may be given in place of a folder
(hub.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import TypeVar

from vllm_ppd.heads.base import COUNTS_NAME, HeadsConfig
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import (
    named,
    read_json_object,
    write_json,
    write_tensors,
)
from vllm_ppd.heads.hub import folder_of, whole_folder
from vllm_ppd.heads.kinds import KINDS, kind_in
from vllm_ppd.heads.planning import Parts
from vllm_ppd.heads.text import (
    LONGEST_VALUE,
    StrPath,
    first_problem,
    quoted,
    shortened,
)

if TYPE_CHECKING:
    from torch import Tensor


Config = TypeVar("Config", bound=HeadsConfig, default=HeadsConfig)
CONFIG_NAME = "config.json"
CALIBRATION_NAME = "calibration.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def kind_of(path: StrPath) -> str | None:
    """The kind of heads that a folder's config names, or None if it names none of ours."""
    try:
        config = Path(folder_of(path, CONFIG_NAME)) / CONFIG_NAME
        return kind_in(read_json_object(config))
    except HeadsError:
        return None


def load_config(folder: StrPath, wanted: type[Config] | None = None) -> Config:
    """Read and check `config.json`.

    Args:
        folder: of the heads, or their name on the Hub.
        wanted: refuse heads of any other class.

    Raises:
        HeadsError: if the folder or the file is missing, is of another kind, or lacks
            or mistypes a field.
    """
    folder = folder_of(folder, CONFIG_NAME)
    if not os.path.isdir(folder):
        raise HeadsError(
            f"heads folder {quoted(folder)} does not exist; pass a folder with "
            f"{CONFIG_NAME}"
        )
    path = Path(folder) / CONFIG_NAME
    data = read_json_object(path)
    kind = kind_in(data)
    kinds = list(KINDS) if wanted is None else [wanted.kind]
    if kind not in kinds:
        found = quoted(kind or data.get("speculators_model_type"))
        raise HeadsError(
            f"{named(path)} holds heads of kind {found}; expected kind "
            f"{', '.join(map(repr, kinds))}"
        )
    try:
        return cast(Config, KINDS[str(kind)].model_validate(data))
    except ValidationError as error:
        raise HeadsError(
            f"{named(path)}: {first_problem(error)}; correct it, or write the heads "
            "again"
        ) from None


def check_folder(folder: StrPath) -> HeadsConfig:
    """Check a heads folder completely: its configuration, and every number of its
    weights.

    Raises:
        HeadsError: as load_tensors.
    """
    return load_tensors(folder)[0]


def load_tensors(
    folder: StrPath, wanted: type[Config] | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """Load a heads folder and check it: its configuration, and the tensors that this
    names, mapped from the files.

    Raises:
        HeadsError: as load_config; if weights are missing or damaged; if a tensor is
            missing, has another shape or dtype, or holds non-finite numbers or
            negative counts.
    """
    folder = whole_folder(folder)
    config = load_config(folder, wanted)
    stored = {
        name: file.get_tensor(name)
        for file in opened_files(folder)
        for name in file.keys()  # noqa: SIM118 (no mapping)
    }
    try:
        tensors = {
            name: _checked_tensor(config, name, shape, stored)
            for name, shape in config.shapes().items()
        }
    except ValueError as error:
        where = named(Path(folder, WEIGHTS_NAME))
        raise HeadsError(
            f"{where}: {error}; train or copy the heads again"
        ) from None
    return config, tensors


def _checked_tensor(
    config: HeadsConfig,
    name: str,
    shape: list[int],
    stored: dict[str, Tensor],
) -> Tensor:
    """A tensor of the configuration.

    Raises:
        ValueError: if it is missing, or is not as configured.
    """
    found = [other for other in config.stored_names(name) if other in stored]
    if not found:
        raise ValueError(f"no tensor {quoted(name)}")
    tensor = stored[found[0]]
    what = f"tensor {quoted(found[0])}"
    if list(tensor.shape) != shape:
        raise ValueError(
            f"{what} has shape {list(tensor.shape)}, expected {shape}"
        )
    is_count = config.is_count(name)
    dtypes = ("int32", "int64") if is_count else config.dtypes
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise ValueError(f"{what} is of {dtype}, expected {' or '.join(dtypes)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{what} has numbers that are not finite")
    if is_count and (tensor < 0).any():
        raise ValueError(f"counts in {what} are negative")
    return tensor


def tensor_names(folder: StrPath) -> list[str]:
    """Names of the tensors of a folder's weights; empty if they cannot be read."""
    try:
        return [name for file in opened_files(folder) for name in file.keys()]  # noqa: SIM118
    except HeadsError:
        return []


def save_heads(
    folder: StrPath,
    config: HeadsConfig,
    tensors: dict[str, Tensor],
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
    write_tensors(folder / WEIGHTS_NAME, stored)
    save_config(folder, config)


def save_config(folder: StrPath, config: HeadsConfig) -> None:
    """Write the configuration of heads whose weights exist already."""
    write_json(Path(folder) / CONFIG_NAME, config.to_json())


def load_calibration(folder: StrPath) -> Parts:
    """The parts of the finished calibration of a heads folder.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not finished, or malformed.
    """
    config = load_config(folder)
    parts = read_calibration(folder).get("parts")
    try:
        return config.parts.model_validate(
            parts, context={"num_layers": config.target.num_hidden_layers}
        )
    except ValidationError as error:
        where = named(Path(folder) / CALIBRATION_NAME)
        raise HeadsError(
            f"{where}: parts.{first_problem(error)}; {_calibrate(folder)} again"
        ) from None


def read_calibration(folder: StrPath) -> dict[str, Any]:
    """The finished calibration of a heads folder as it is stored, without a check of
    its parts.

    Raises:
        MissingFile, HeadsError: as load_calibration.
    """
    path = Path(folder) / CALIBRATION_NAME
    unfinished = (
        f"heads in {quoted(os.fspath(folder))} have no finished calibration; "
        f"{_calibrate(folder)}"
    )
    try:
        result = read_json_object(path, f"{_calibrate(folder)} again")
    except MissingFile:
        raise MissingFile(unfinished) from None
    if result.get("finished") is not True:
        raise HeadsError(unfinished)
    return result


def _calibrate(folder: StrPath) -> str:
    return f"run `ppd calibrate {quoted(os.fspath(folder))} --data FILE`"


def opened_files(folder: StrPath) -> Iterator[Any]:
    """Open each file of a folder's weights: the shards if there is an index and no
    whole file; then that of counts, if there is one.

    Raises:
        MissingFile: if a file is missing; pickles are never loaded.
        HeadsError: if a file is damaged.
    """
    names = [WEIGHTS_NAME]
    index = Path(folder, INDEX_NAME)
    if index.exists() and not Path(folder, WEIGHTS_NAME).exists():
        places = read_json_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise HeadsError(
                f"{named(index)} has no weight_map; copy or write the heads again"
            )
        names = sorted(set(map(str, places.values())))
    if Path(folder, COUNTS_NAME).exists():
        names.append(COUNTS_NAME)
    for name in names:
        path = Path(folder, name)
        if not path.is_file():
            raise MissingFile(
                f"heads folder {quoted(str(folder))} has no {name}; save the heads as "
                "safetensors"
            )
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            reason = shortened(str(error), LONGEST_VALUE)
            raise HeadsError(
                f"{named(path)} is not whole safetensors ({reason}); copy or write "
                "the heads again"
            ) from None
