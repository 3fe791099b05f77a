# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: one safetensors file, replaced whole, so that a kill at any moment loses little."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import write_tensors
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.evaluation import Progress
from vllm_ppd.heads.training.optimizer import ADAMW_STATE, MUON_STATE

NAME = "state.safetensors"


class RunFacts(BaseModel):
    """Where a run stands."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, Any]
    step: int = Field(ge=0)
    seconds: float
    before: dict[str, Any]  # the evaluation before the first step
    smoothed: float  # the loss
    best: float
    tokens: str | None = None  # digest of the token files (None: of an earlier version)
    held_out: Progress = Progress()


def save_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, facts: RunFacts) -> None:
    """Write the trained parameters, the optimiser's moments and facts in one file, with a checksum of all."""
    tensors = {f"module.{name}": p.detach().cpu().contiguous() for name, p in module.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value).cpu() for key, value in state.items()}
    written = json.dumps(facts.model_dump())
    write_tensors(folder / NAME, tensors, {"facts": written, "checksum": _checksum(tensors, written)})


def load_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> RunFacts | None:
    """Restore what save_state wrote, in place; returns its facts, or None if there is nothing.

    Raises:
        TrainingError: if the file is damaged or of another module.
    """
    path = folder / NAME
    facts = peek_facts(folder)
    if facts is None:
        return None
    metadata, tensors = _read(path)
    if metadata.get("checksum") not in (None, _checksum(tensors, metadata["facts"])):
        raise _damaged(path, "its checksum differs")
    parameters = dict(module.named_parameters())
    shapes = {f"module.{name}": p.shape for name, p in parameters.items()}
    if {name: t.shape for name, t in tensors.items() if name.startswith("module.")} != shapes:
        raise TrainingError(f"{place(path)} is of other heads; delete the folder {folder.name} there to start again")
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".", 2)
            state.setdefault(int(number), {})[key] = tensor
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for index, moments in state.items():  # a parameter without gradients has none
        known = index < len(trained) and set(moments) in (ADAMW_STATE, MUON_STATE)
        if not known or any(moments[name].shape != trained[index].shape for name in set(moments) - {"step"}):
            raise _damaged(path, "its optimiser state does not fit")
    if facts.step and not state:
        raise _damaged(path, "it lacks the optimiser's state")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"module.{name}"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return facts


def save_weights(path: Path, module: nn.Module, step: int) -> None:
    """Write the trained parameters alone, with the step that they are of and a checksum."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in module.named_parameters()}
    write_tensors(path, tensors, {"step": str(step), "checksum": _checksum(tensors, str(step))})


def load_weights(path: Path, module: nn.Module, step: int) -> None:
    """Restore what save_weights wrote, in place.

    Raises:
        TrainingError: if the file is missing, damaged, or of another step or module.
    """
    metadata, tensors = _read(path)
    parameters = dict(module.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    found = metadata.get("step"), metadata.get("checksum")
    if found != (str(step), _checksum(tensors, str(step))) or {n: t.shape for n, t in tensors.items()} != shapes:
        raise _damaged(path, "its checksum differs")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file.

    Raises:
        TrainingError: if it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None


def peek_facts(folder: Path) -> RunFacts | None:
    """The facts of a checkpoint, without its tensors; None if there is none.

    Raises:
        TrainingError: if the file is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return RunFacts.model_validate(json.loads(file.metadata()["facts"]))
    except ValidationError as error:
        problem = error.errors()[0]
        raise _damaged(path, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> TrainingError:
    found = " ".join(reason.split())[:80]
    return TrainingError(
        f"{place(path)} is damaged ({found}); delete the folder {path.parent.name} there to start again"
    )


def _checksum(tensors: dict[str, torch.Tensor], facts: str) -> str:
    """CRC-32 of facts, names and values."""
    found = zlib.crc32(facts.encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
