# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: one safetensors file, replaced whole, so that a kill at any moment loses little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_ppd.heads.checkpoint import write_tensors
from vllm_ppd.heads.training import TrainingError

NAME = "state.safetensors"


def save_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write the trained parameters, the optimiser's moments and facts (JSON) in one file."""
    tensors = {f"module.{name}": p.detach().cpu().contiguous() for name, p in module.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value).cpu() for key, value in state.items()}
    write_tensors(folder / NAME, tensors, {"facts": json.dumps(facts)})


def load_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore what save_state wrote, in place; returns its facts, or None if there is nothing.

    Raises:
        TrainingError: if the file is damaged or of another module.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise TrainingError(f"{path} is damaged ({error}); delete it to start again") from None
    parameters = dict(module.named_parameters())
    if {f"module.{name}" for name in parameters} - set(tensors):
        raise TrainingError(f"{path} is of other heads; delete it to start again")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"module.{name}"])
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return facts


def peek_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a checkpoint, without its tensors."""
    try:
        with safe_open(folder / NAME, framework="pt") as file:
            return json.loads(file.metadata()["facts"])
    except (FileNotFoundError, SafetensorError, KeyError, ValueError, TypeError):
        return None
