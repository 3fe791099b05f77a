# SPDX-License-Identifier: Apache-2.0
"""A quantised checkpoint of a tiny model, as compressed-tensors writes one: 8 bits of weights and activations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8: dict[str, Any] = {
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(model: Path, folder: Path) -> Path:
    """Write a model with linear layers of 8 bits: a scale a row of the weights, and one a token of the activations."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": _W8A8}))
    return folder
