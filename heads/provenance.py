# SPDX-License-Identifier: Apache-2.0
"""Where results and heads come from: `provenance.json` with command, time, versions,
machine and settings, and the model card of a heads folder (README.md).
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from pydantic import Field, ValidationError

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.data.records import expand
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import named, read_json_object, write_text
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.planning import Stored
from vllm_ppd.heads.text import StrPath, first_problem

PROVENANCE_NAME = "provenance.json"
PACKAGES = (
    "vllm-ppd",
    "vllm",
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "pydantic",
)
CARD_NAME = "README.md"
BEGIN = "<!-- vllm-ppd: `ppd calibrate` writes what follows anew, up to the end mark -->"
END = "<!-- vllm-ppd: end -->"


def provenance(**facts: Any) -> dict[str, Any]:
    """The facts, with command, time, commit, versions and machine added."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": _commit(),
        "versions": versions(),
        "machine": machine(),
        **facts,
    }


def versions() -> dict[str, str]:
    """Installed versions of the relevant packages and of Python."""
    installed = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed | {"python": platform.python_version()}


def machine() -> str:
    """Cores and processor, or the GPUs."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    on_linux = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count()
    return f"{count} cores, {processor()}"


def processor() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"^model name\s*: (.*)", lines, re.MULTILINE)
    return name[1] if name else platform.machine()


def _commit() -> str | None:
    """The commit of a source checkout, with -dirty after changes; None for an installed
    package.
    """
    here = Path(__file__).resolve().parents[1]
    try:
        command = [
            "git",
            # A checkout around an installed package is another project's
            "--git-dir=.git",
            "describe",
            "--always",
            "--dirty",
            "--abbrev=40",
            "--exclude=*",
        ]
        run = subprocess.run(command, capture_output=True, text=True, cwd=here)
    except OSError:
        return None
    return run.stdout.strip() or None


class Provenance(Stored):
    """The fields of `provenance.json` that are read again."""

    command: str
    time: str
    tokens: int | None = None
    steps: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    # Names without their folders, and sizes in bytes
    data_files: list[dict[str, Any]] = Field(default_factory=list)


def provenance_of(folder: StrPath) -> Provenance:
    """The provenance of the heads in a folder.

    Raises:
        MissingFile: if the folder has none.
        HeadsError: if its `provenance.json` is not that of heads.
    """
    path = Path(folder) / PROVENANCE_NAME
    instead = "train the heads again, or delete it"
    try:
        return Provenance.model_validate(read_json_object(path, instead))
    except ValidationError as error:
        raise HeadsError(
            f"{named(path)}: {first_problem(error)}; {instead}"
        ) from None


def data_files(paths: Sequence[StrPath]) -> list[dict[str, Any]]:
    """The files behind paths, as `provenance.json` names them.

    Raises:
        TrainingError: as expand.
    """
    return [
        {"name": file.name, "size": file.stat().st_size} for file in expand(paths)
    ]


def write_card(
    folder: StrPath,
    config: HeadsConfig,
    calibration: str | None = None,
) -> None:
    """Write the model card, or rewrite the part between its marks; what a user wrote
    around them stays.

    A card without the marks is the user's and is left alone.

    Args:
        folder: with the heads and, if they were trained here, their provenance.
        config: of the heads.
        calibration: the report of a finished calibration.
    """
    path = Path(folder) / CARD_NAME
    try:
        facts = provenance_of(folder)
    except HeadsError:  # the heads were not trained here
        facts = Provenance(command="", time="not known")
    if path.exists():
        card = path.read_text(encoding="utf-8")
    else:
        data = ModelCardData(
            license=facts.options.get("license", "other"),
            library_name="vllm",
            pipeline_tag="text-generation",
            base_model=_base_model(config.verifier),
            tags=["speculative-decoding", "vllm-ppd", "speculators", config.kind],
        )
        card = f"---\n{data.to_yaml()}\n---\n{BEGIN}{END}\n"
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        body = _body(config, facts, calibration)
        write_text(path, f"{before}{BEGIN}\n\n{body}\n\n{END}{after}")


def _body(config: HeadsConfig, facts: Provenance, calibration: str | None) -> str:
    name = shown_target(config)
    target = config.target
    served = name if hub_name(config.verifier) else "TARGET"
    return f"""\
# {config.kind} heads for {name}

Small heads with which [vLLM](https://github.com/vllm-project/vllm) drafts tokens of the target
model, through the plugin `vllm-ppd`. The target verifies every draft, so the output keeps its
distribution, up to rounding.

- target: {name} ({target.model_type}, {target.num_hidden_layers} layers, \
hidden size {target.hidden_size}, vocabulary {target.vocab_size})
- heads: {config.kind}: {config.describe()}, {config.dtype}
- recommended drafts per step: {config.num_speculative_tokens}
- trained: {facts.time}, {facts.steps} steps, {facts.tokens} tokens (`provenance.json`)
- files: speculators' layout, read by vllm-ppd

    vllm serve {served} --speculative-model HEADS    # this repository, or a folder with its files

## Calibration

{calibration or "Not calibrated (`ppd calibrate`)."}"""


def _base_model(name: str) -> str | None:
    """The target's name on the Hub, also of its folder in the Hub's cache."""
    if (on_hub := hub_name(name)) is not None:
        return on_hub.repo
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", name)
    return "/".join(cached.groups()) if cached else None


def shown_target(config: HeadsConfig) -> str:
    """The name of the target without the folders of the disk that it was on."""
    name = config.verifier
    return os.path.basename(name) if os.path.isabs(name) else name
