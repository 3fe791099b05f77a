# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of random weights for a tiny model, as PEFT writes one."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
ATTENTION = ("q_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "down_proj", "lm_head", "embed_tokens")

# vLLM's CPU build gives requests without an adapter the last one's place, which must be
# empty.
SETTINGS = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}


def make_adapter(folder: Path, model: Path, scale: float = 0.2) -> Path:
    """Write an adapter of the layers, the input embeddings and the LM head, strong
    enough to change what is said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        parts = ("lora_A.weight", "lora_B.weight")
        if module.endswith("embed_tokens"):
            parts = ("lora_embedding_A", "lora_embedding_B")
            weight = weight.T
        if module.rpartition(".")[2] not in TARGETS:
            continue
        shapes = ((RANK, weight.shape[1]), (weight.shape[0], RANK))
        for part, shape in zip(parts, shapes, strict=True):
            tensors[f"base_model.model.{module}.{part}"] = scale * torch.randn(
                shape
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
        "target_modules": TARGETS,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
