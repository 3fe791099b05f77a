# SPDX-License-Identifier: Apache-2.0
"""The weights of a heads folder: `model.safetensors`, or the shards of an index, and files beside them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads import hub
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import check_is_regular, named, read_json_object
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened

WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
COUNTS_NAME = "token_counts.safetensors"  # for heads whose published weights are not changed
LONGEST_INDEX = 16 << 20  # bytes
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


class Stored(NamedTuple):
    """A tensor as described by the header of its file."""

    path: Path
    shape: list[int]
    dtype: str  # as safetensors names it


def with_weights(name: str | os.PathLike[str], config_name: str, beside: Sequence[str] = ()) -> str:
    """The folder of heads on this disk, with all of their weights.

    Args:
        name: a folder, which is returned as it is, or a name on the Hub, whose files are fetched.
        config_name: of the configuration.
        beside: optional files beside the weights.

    Raises:
        HeadsError: as hub.folder_of, or if an index of shards is damaged.
    """
    try:
        return hub.folder_of(name, config_name, WEIGHTS_NAME, also=beside)
    except MissingFile as missing:
        return hub.folder_of(name, config_name, *file_names(_with_index(name, missing)), also=beside)


def stored_tensors(folder: str | os.PathLike[str], beside: Sequence[str] = ()) -> dict[str, Stored]:
    """Every tensor in the files of a folder's weights, by its name in the file.

    Raises:
        MissingFile: if a file is missing.
        HeadsError: if a file is not a regular one, or is damaged; pickles are never loaded.
    """
    tensors: dict[str, Stored] = {}
    for name in (*file_names(folder), *(name for name in beside if os.path.lexists(Path(folder, name)))):
        path = Path(folder, name)
        try:
            check_is_regular(path)
        except MissingFile:
            pickles = sorted(name for name in os.listdir(path.parent) if Path(name).suffix in PICKLE_SUFFIXES)
            if not pickles:
                raise
            pickle = f"heads folder {quoted(str(folder))} has only a pickle, {quoted(pickles[0])}, which is not loaded"
            raise HeadsError(f"{pickle}; save the heads as {WEIGHTS_NAME}") from None
        with damage_in_a_line(path), safe_open(path, framework="np") as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 (no mapping)
            tensors |= {tensor: Stored(path, rows.get_shape(), rows.get_dtype()) for tensor, rows in slices.items()}
    return tensors


def remote_tensors(name: str, folder: str, beside: Sequence[str] = ()) -> dict[str, Stored]:
    """The same for heads on the Hub, from the files' headers alone.

    Args:
        name: of the heads.
        folder: in the Hub's cache, with the existing files beside the weights.
        beside: as of stored_tensors.

    Raises:
        MissingFile, HeadsError: as hub.remote_tensors.
    """
    try:
        headers = {WEIGHTS_NAME: hub.remote_tensors(name, WEIGHTS_NAME)}
    except MissingFile as missing:
        headers = {file: hub.remote_tensors(name, file) for file in file_names(_with_index(name, missing))}
    headers |= {file: hub.remote_tensors(name, file) for file in beside if os.path.isfile(Path(folder, file))}
    return {
        tensor: Stored(Path(folder, file), *stored)
        for file, header in headers.items() for tensor, stored in header.items()
    }  # fmt: skip


def _with_index(name: str | os.PathLike[str], missing: MissingFile) -> str:
    """The folder of heads on the Hub with the index of their shards; without an index, raise the given error."""
    try:
        return hub.folder_of(name, INDEX_NAME)
    except MissingFile:
        raise missing from None


@contextmanager
def damage_in_a_line(path: Path) -> Iterator[None]:
    """Turn errors about damaged files into a HeadsError of one line."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        problem = f"is truncated or not safetensors ({shortened(str(error), LONGEST_VALUE)})"
        raise HeadsError(f"{named(path)} {problem}; copy or write the heads again") from None


def file_names(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the weights' files in a folder: the shards if there is an index and no whole file.

    Raises:
        HeadsError: if the index is damaged, or names files in other folders.
    """
    index = Path(folder, INDEX_NAME)
    if os.path.lexists(Path(folder, WEIGHTS_NAME)) or not os.path.lexists(index):
        return [WEIGHTS_NAME]
    places = read_json_object(index, LONGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise HeadsError(f"{named(index)} has no weight_map; copy or write the heads again")
    for name in places.values():
        if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise HeadsError(f"{named(index)} names {quoted(name)}, not a safetensors file; write the heads again")
    return sorted(set(places.values()))
