# SPDX-License-Identifier: Apache-2.0
"""The provenance of results or heads: command, time, versions, machine, settings."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import first_problem, named, read_json_object

NAME = "provenance.json"
LONGEST = 16 << 20  # bytes
END = 1 << 20  # bytes hashed at each end of a data file, so that large files are quick
MOST_FILES = 4096  # most data files that are named
PACKAGES = ("vllm-ppd", "vllm", "torch", "transformers", "safetensors", "pydantic", "accelerate", "ray")


def versions() -> dict[str, str]:
    """Installed versions of the relevant packages and of Python."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> str:
    """Cores and processor, or the GPUs."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{'1 core' if count == 1 else f'{count} cores'}, {processor()}"


def processor() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def provenance(**facts: Any) -> dict[str, Any]:
    """The facts, with command, time, versions and machine added."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": _commit(),
        "versions": versions(),
        "machine": machine(),
        **facts,
    }


class DataFile(BaseModel):
    """A file of training data, as `provenance.json` names it."""

    model_config = ConfigDict(strict=True)
    name: str = Field(max_length=4096)  # without its folder
    size: int = Field(ge=0, le=1 << 62)  # bytes
    sha256_of_ends: str = Field(max_length=64)  # of its first and its last mebibyte


class Provenance(BaseModel):
    """The fields of `provenance.json` that are read again."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    command: str
    time: str = Field(max_length=80)
    tokens: int | None = Field(None, ge=0, le=1 << 62)
    steps: int | None = Field(None, ge=0, le=1 << 62)
    documents_in_data: int | None = Field(None, ge=0, le=1 << 62)
    seconds: float | None = Field(None, ge=0, le=1e12)
    held_out_before: dict[str, Any] = Field(default_factory=dict)
    held_out_after: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    data_files: list[DataFile] = Field(default_factory=list)


def provenance_of(folder: str | os.PathLike[str]) -> Provenance:
    """The provenance of the heads in a folder.

    Raises:
        MissingFile: if the folder has none.
        HeadsError: if its `provenance.json` is not that of heads.
    """
    path, instead = Path(folder) / NAME, "train the heads again, or delete it"
    try:
        return Provenance.model_validate(read_json_object(path, LONGEST, instead))
    except ValidationError as error:
        raise HeadsError(f"{named(path)}: {first_problem(error)}; {instead}") from None


def data_files(paths: Sequence[str | Path]) -> list[DataFile]:
    """The files behind paths, the first 4096 of them.

    Raises:
        TrainingError: as expand.
    """
    return [_described(file) for file in expand(paths)[:MOST_FILES]]


def trained_on(files: Sequence[Path], known: Sequence[DataFile], paths: Sequence[str]) -> list[Path]:
    """The files that heads were trained on, compared by size and digest, or by path if these are not known.

    Args:
        files: to look up.
        known: of the heads' provenance.
        paths: the data paths of their training, relative to the folder in which it ran.
    """
    if known:
        digests = {(file.size, file.sha256_of_ends) for file in known}
        sizes = {size for size, _ in digests}
        alike = ((file, _described(file)) for file in files if file.stat().st_size in sizes)
        return [file for file, described in alike if (described.size, described.sha256_of_ends) in digests]
    places = {Path(path).resolve() for path in paths}
    return [file for file in files if places & {file.resolve(), *file.resolve().parents}]


def _described(file: Path) -> DataFile:
    size = file.stat().st_size
    with file.open("rb") as handle:
        digest = hashlib.sha256(handle.read(END))
        handle.seek(max(handle.tell(), size - END))
        digest.update(handle.read(END))
    return DataFile(name=file.name, size=size, sha256_of_ends=digest.hexdigest())


def _commit() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():  # a checkout around an installed package is another project's
        return None
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None
