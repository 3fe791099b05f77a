# SPDX-License-Identifier: Apache-2.0
"""The files that heads were trained on, as `provenance.json` names them, and whether other files are among them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vllm_ppd.heads.data.files import expand

END = 1 << 20  # bytes that are hashed at either end: files of many gigabytes take no time
MOST_FILES = 4096  # that are named


class DataFile(BaseModel):
    """A file of training data."""

    model_config = ConfigDict(strict=True)
    name: str = Field(max_length=4096)  # without its folder
    size: int = Field(ge=0, le=1 << 62)  # bytes
    sha256_of_ends: str = Field(max_length=64)  # of its first and its last mebibyte


def data_files(paths: Sequence[str | Path]) -> list[DataFile]:
    """The files behind paths, the first 4096 of them.

    Raises:
        TrainingError: as expand.
    """
    return [_described(file) for file in expand(paths)[:MOST_FILES]]


def trained_on(files: Sequence[Path], known: Sequence[DataFile], paths: Sequence[str]) -> list[Path]:
    """Which files heads were trained on: by size and digest, or, where these are not known, by path.

    Args:
        files: to be looked up.
        known: of the heads' provenance.
        paths: what their training was given, from the folder that it ran in.
    """
    if known:
        sizes = {(one.size, one.sha256_of_ends) for one in known}
        alike = [file for file in files if file.stat().st_size in {size for size, _ in sizes}]
        return [file for file in alike if (found := _described(file)) and (found.size, found.sha256_of_ends) in sizes]
    places = {Path(path).resolve() for path in paths}
    return [file for file in files if places & {file.resolve(), *file.resolve().parents}]


def _described(file: Path) -> DataFile:
    size = file.stat().st_size
    with file.open("rb") as handle:
        digest = hashlib.sha256(handle.read(END))
        handle.seek(max(handle.tell(), size - END))
        digest.update(handle.read(END))
    return DataFile(name=file.name, size=size, sha256_of_ends=digest.hexdigest())
