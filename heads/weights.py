# SPDX-License-Identifier: Apache-2.0
"""`model.safetensors` of a heads folder: names, shapes, dtypes and values, as the configuration says; writing both.

The tensors stay mapped from the file, and every one is read once to see that it is finite: 0.02 s for 270 MB of
bfloat16 in the page cache, on one core.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import named, of_folder, regular_size, write_tensors, write_text
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened
from vllm_ppd.heads.raw_tensors import raw_tensors

if TYPE_CHECKING:
    import torch

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
LONGEST_HEADER = 16 << 20  # bytes: names and shapes of a hundred thousand tensors
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "int32", "I64": "int64"}


def read_weights(config: HeadsConfig, folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors that the configuration names, checked and mapped from the file; others in it are not read.

    Raises:
        HeadsError: as check_weights.
    """
    check_weights(config, folder)
    with safe_open(Path(folder) / WEIGHTS_NAME, framework="pt") as file:
        return {name: file.get_tensor(name) for name in config.shapes()}


def check_weights(config: HeadsConfig, folder: str | os.PathLike[str]) -> None:
    """Check every number of the tensors that the configuration names.

    Raises:
        HeadsError: if the file is missing, truncated, a pickle or not regular, or if a tensor lacks, or is of another
            shape or dtype, or holds what is not finite, or counts that cannot be.
    """
    path = Path(folder) / WEIGHTS_NAME
    _check_file(path)
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            check_header(config, {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}, path)
        tensors = raw_tensors(path, config.shapes())
    except (SafetensorError, OSError) as error:
        problem = shortened(str(error), LONGEST_VALUE)
        raise HeadsError(
            f"{named(path)} is truncated or not safetensors ({problem}); copy or write the heads again"
        ) from None
    for name, tensor in tensors.items():
        if config.is_count(name):
            if tensor.bits.size and int(tensor.bits.min()) < 0:
                raise HeadsError(f"{named(path)}: counts in tensor {quoted(name)} are negative; write the heads again")
        elif not tensor.is_finite:
            raise HeadsError(
                f"{named(path)}: tensor {quoted(name)} has numbers that are not finite; train or copy the heads again"
            )
    try:
        config.check_counts({name: tensor.bits for name, tensor in tensors.items() if config.is_count(name)})
    except ValueError as error:
        raise HeadsError(f"{named(path)}: {error}; write the heads again") from None


def tensor_names(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the tensors of a folder's weights; none where they cannot be read."""
    path = Path(folder) / WEIGHTS_NAME
    try:
        _check_file(path)
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (HeadsError, SafetensorError, OSError):
        return []


def _check_file(path: Path) -> None:
    """Refuse what must not be opened, and headers that would take long to parse."""
    try:
        size = regular_size(path)
    except MissingFile:
        pickles = sorted(name for name in os.listdir(path.parent) if Path(name).suffix in PICKLE_SUFFIXES)
        if pickles:
            raise HeadsError(
                f"{of_folder(path)} holds {quoted(pickles[0])}, a pickle, which is never loaded; "
                f"save the heads as {WEIGHTS_NAME}"
            ) from None
        raise MissingFile(f"{of_folder(path)} has no {WEIGHTS_NAME}; write the heads again") from None
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise HeadsError(f"{named(path)} cannot be read ({error.strerror}); copy the heads again") from None
    if size < 8 or header > min(size - 8, LONGEST_HEADER):
        raise HeadsError(f"{named(path)} is truncated or not safetensors; copy or write the heads again")


def check_header(config: HeadsConfig, header: dict[str, tuple[list[int], str]], path: Path) -> None:
    """Compare what a file of weights says of its tensors with the configuration.

    Args:
        config: of the heads.
        header: shape and safetensors' dtype of each tensor.
        path: of the file, for the message.

    Raises:
        HeadsError: on the first tensor that lacks, or has another shape or dtype.
    """
    for name, expected in config.shapes().items():
        if name not in header:
            raise HeadsError(f"{named(path)} has no tensor {quoted(name)}; write the heads again")
        shape, dtype = header[name]
        if list(shape) != expected:
            raise HeadsError(f"{named(path)}: tensor {quoted(name)} has shape {list(shape)}, expected {expected}")
        wanted = ("int32", "int64") if config.is_count(name) else (config.dtype,)
        stored = DTYPES.get(dtype, dtype.lower())
        if stored not in wanted:
            raise HeadsError(
                f"{named(path)}: tensor {quoted(name)} is of {stored}, expected {' or '.join(wanted)}; write the heads "
                "again"
            )


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
