# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of random weights for a tiny model, as PEFT writes one."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def make_adapter(folder: Path, model: Path, scale: float = 0.2) -> Path:
    """Write an adapter of the layers, the input embeddings and the LM head, strong
    enough to change what is said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in (*MODULES, "lm_head"):
            tensors[f"base_model.model.{module}.lora_A.weight"] = (
                scale * torch.randn(RANK, weight.shape[1])
            )
            tensors[f"base_model.model.{module}.lora_B.weight"] = (
                scale * torch.randn(weight.shape[0], RANK)
            )
        elif module.endswith("embed_tokens"):
            tensors[f"base_model.model.{module}.lora_embedding_A"] = (
                scale * torch.randn(RANK, weight.shape[0])
            )
            tensors[f"base_model.model.{module}.lora_embedding_B"] = (
                scale * torch.randn(weight.shape[1], RANK)
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*MODULES, "lm_head", "embed_tokens"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
