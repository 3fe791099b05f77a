# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of a tiny model, as compressed-tensors, AutoAWQ and GPTQ write them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.kernels.linear.scaled_mm import cpu as int8_kernels

GROUP = 32  # weights that share a scale, of the formats of 4 bits
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's places of eight columns in a number
Tensors = dict[str, torch.Tensor]


def w8a8(name: str, weight: torch.Tensor) -> Tensors:
    """8 bits: a scale a row of the weights, and one a token of the activations, found
    as they come.
    """
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {
        f"{name}.weight": (weight / scale).round().to(torch.int8),
        f"{name}.weight_scale": scale,
    }


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(Numbers 0..15 [in, out] of weights [out, in], 8 being zero; scales [in / GROUP, out])."""
    grouped = weight.t().unflatten(0, (-1, GROUP))
    scale = grouped.abs().amax(dim=1, keepdim=True) / 7
    return ((grouped / scale).round() + 8).clamp(0, 15).flatten(0, 1).to(
        torch.int64
    ), scale[:, 0]


def _packed(
    numbers: torch.Tensor, dim: int, order: list[int] | None = None
) -> torch.Tensor:
    """Eight numbers of a dimension in an int32."""
    parts = numbers.unflatten(dim, (-1, 8)).unbind(dim + 1 if dim >= 0 else dim)
    packed = torch.zeros_like(parts[0])
    for place, part in enumerate(order or range(8)):
        packed |= parts[part] << (4 * place)
    return (
        torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
        .to(torch.int32)
        .contiguous()
    )


def awq(name: str, weight: torch.Tensor) -> Tensors:
    """4 bits in AutoAWQ's layout: packed along the outputs."""
    numbers, scale = _four_bits(weight)
    zeros = torch.full_like(scale, 8).to(torch.int64)
    packed = {
        "qweight": _packed(numbers, 1, _ORDER),
        "qzeros": _packed(zeros, 1, _ORDER),
        "scales": scale.half(),
    }
    return {f"{name}.{key}": value for key, value in packed.items()}


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    """4 bits in GPTQ's layout: packed along the inputs, zeros less one."""
    numbers, scale = _four_bits(weight)
    packed = {
        "qweight": _packed(numbers, 0),
        "qzeros": _packed(torch.full_like(scale, 7).to(torch.int64), 1),
        "scales": scale.half(),
        "g_idx": (torch.arange(len(numbers)) // GROUP).to(torch.int32),
    }
    return {f"{name}.{key}": value for key, value in packed.items()}


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


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
}
# Format -> (how a matrix is written, quantization_config, whether the LM head is
# quantised).
FORMATS: Mapping[
    str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any], bool]
] = {
    "w8a8": (w8a8, _w8a8_config("Linear") | {"ignore": ["lm_head"]}, False),
    "w8a8-head": (w8a8, _w8a8_config("Linear", "re:.*lm_head"), True),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        False,
    ),
    "gptq": (gptq, _GPTQ | {"lm_head": False}, False),
    "gptq-head": (gptq, _GPTQ | {"lm_head": True}, True),
}


def dtype(kind: str) -> str:
    """float32, in which tokens are compared exactly, where vLLM's kernels of a format
    take it on this processor.

    Those of 4 bits take 16-bit activations alone, as does that of 8 bits which vLLM
    chooses where there is AMX.
    """
    sixteen = (
        int8_kernels.check_cpu_sgl_kernel(64, 64, torch.int8)
        if kind.startswith("w8a8")
        else True
    )
    return "bfloat16" if sixteen else "float32"


def quantise(model: Path, folder: Path, kind: str) -> Path:
    """Write a model's linear layers in a format, and the rest as it is."""
    write, config, head = FORMATS[kind]
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") or (head and module == "lm_head"):
            tensors |= write(module, weight)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(whole | {"quantization_config": config})
    )
    return folder
