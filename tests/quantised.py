# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of a tiny model, as compressed-tensors writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def w8a8(name: str, weight: torch.Tensor) -> Tensors:
    """8 bits: a scale a row of the weights, and one a token of the activations, found as they come."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def _w8a8_config(*targets: str) -> dict[str, Any]:
    group = {
        "targets": list(targets),
        "weights": {**_INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


# Format -> (quantization_config, whether the LM head is quantised).
FORMATS: dict[str, tuple[dict[str, Any], bool]] = {
    "w8a8": (_w8a8_config("Linear") | {"ignore": ["lm_head"]}, False),
    "w8a8-head": (_w8a8_config("Linear", "re:.*lm_head"), True),
}


def quantise(model: Path, folder: Path, kind: str) -> Path:
    """Write a model's linear layers in a format, and the rest as it is."""
    config, head = FORMATS[kind]
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") or (head and module == "lm_head"):
            tensors |= w8a8(module, weight)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    return folder
