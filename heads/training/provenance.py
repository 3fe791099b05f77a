# SPDX-License-Identifier: Apache-2.0
"""Where a file of results or heads came from: command, time, versions, machine, settings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import named, read_json_object
from vllm_ppd.heads.io import first_problem
from vllm_ppd.heads.training.data_files import DataFile

NAME = "provenance.json"
LONGEST = 16 << 20  # bytes
PACKAGES = ("vllm-ppd", "vllm", "torch", "transformers", "safetensors", "pydantic", "accelerate", "ray")


def versions() -> dict[str, str]:
    """Installed versions of what matters here, Python included."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Cores and processor, or the GPUs."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return f"{cores} cores, {line.split(':', 1)[1].strip()}"
    return f"{cores} cores, {platform.machine()}"


def provenance(**facts: Any) -> dict[str, Any]:
    """The facts, and around them what is always told."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": _commit(),
        "versions": versions(),
        "machine": machine(),
        **facts,
    }


class Provenance(BaseModel):
    """What is read again of `provenance.json`."""

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
    """How the heads of a folder were trained.

    Raises:
        MissingFile: if the folder does not say.
        HeadsError: if its `provenance.json` is not one of heads.
    """
    path, instead = Path(folder) / NAME, "train the heads again, or delete it"
    try:
        return Provenance.model_validate(read_json_object(path, LONGEST, instead))
    except ValidationError as error:
        raise HeadsError(f"{named(path)}: {first_problem(error)}; {instead}") from None


def _commit() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None
