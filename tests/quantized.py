# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints of a tiny model, as compressed-tensors, AutoAWQ and GPTQ write them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.kernels.linear.scaled_mm import cpu as int8_kernels

GROUP = 32  # weights that share a scale, of the formats of 4 bits
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's places of eight columns in a number
Tensors = dict[str, torch.Tensor]


def w8a8(weight: torch.Tensor) -> Tensors:
    """8 bits: a scale a row of the weights, and one a token of the activations, found
    as they come.
    """
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {
        "weight": (weight / scale).round().to(torch.int8),
        "weight_scale": scale,
    }


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(Numbers 0..15 [in, out] of weights [out, in], 8 being zero; scales [in / GROUP, out])."""
    grouped = weight.t().unflatten(0, (-1, GROUP))
    scale = grouped.abs().amax(dim=1, keepdim=True) / 7
    numbers = ((grouped / scale).round() + 8).clamp(0, 15)
    return numbers.flatten(0, 1).long(), scale[:, 0]


def _packed(
    numbers: torch.Tensor, dim: int, order: Sequence[int] = range(8)
) -> torch.Tensor:
    """Eight numbers of a dimension in an int32."""
    parts = numbers.unflatten(dim, (-1, 8)).unbind(dim + 1)
    packed = torch.zeros_like(parts[0])
    for place, part in enumerate(order):
        packed |= parts[part] << (4 * place)
    return packed.to(torch.int32).contiguous()


def awq(weight: torch.Tensor) -> Tensors:
    """4 bits in AutoAWQ's layout: packed along the outputs."""
    numbers, scale = _four_bits(weight)
    return {
        "qweight": _packed(numbers, 1, _ORDER),
        "qzeros": _packed(torch.full_like(scale, 8).long(), 1, _ORDER),
        "scales": scale.half(),
    }


def gptq(weight: torch.Tensor) -> Tensors:
    """4 bits in GPTQ's layout: packed along the inputs, zeros less one."""
    numbers, scale = _four_bits(weight)
    return {
        "qweight": _packed(numbers, 0),
        "qzeros": _packed(torch.full_like(scale, 7).long(), 1),
        "scales": scale.half(),
        "g_idx": (torch.arange(len(numbers)) // GROUP).to(torch.int32),
    }


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
}
_GROUP = {
    "weights": {**_INT8, "strategy": "channel", "dynamic": False},
    "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
}
_LINEAR = {"group_0": {**_GROUP, "targets": ["Linear"]}}
_LM_HEAD = {"group_0": {**_GROUP, "targets": ["Linear", "re:.*lm_head"]}}
_BITS = {"bits": 4, "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True, **_BITS}
# Format -> (how a matrix is written, quantization_config).
FORMATS: Mapping[
    str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]
] = {
    "w8a8": (w8a8, _W8A8 | {"config_groups": _LINEAR, "ignore": ["lm_head"]}),
    "w8a8-head": (w8a8, _W8A8 | {"config_groups": _LM_HEAD}),
    "awq": (
        awq,
        {"quant_method": "awq", "zero_point": True, "version": "gemm", **_BITS},
    ),
    "gptq": (gptq, _GPTQ | {"lm_head": False}),
    "gptq-head": (gptq, _GPTQ | {"lm_head": True}),
}


def dtype(kind: str) -> str:
    """float32, in which tokens are compared exactly, where vLLM's kernels of a format
    take it on this processor.

    Those of 4 bits take 16-bit activations alone, as does that of 8 bits which vLLM
    chooses where there is AMX.
    """
    takes_float32 = kind.startswith(
        "w8a8"
    ) and not int8_kernels.check_cpu_sgl_kernel(64, 64, torch.int8)
    return "float32" if takes_float32 else "bfloat16"


def quantize(model: Path, folder: Path, kind: str) -> Path:
    """Write a model's linear layers in a format, and the rest as it is."""
    write, config = FORMATS[kind]
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") or (
            kind.endswith("head") and module == "lm_head"
        ):
            for part, value in write(weight).items():
                tensors[f"{module}.{part}"] = value
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(whole))
    return folder
