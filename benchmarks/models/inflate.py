# SPDX-License-Identifier: Apache-2.0
"""Width inflation: make a trained model and its heads N times as wide with the same
function.

    python -m vllm_ppd.benchmarks.models inflate --model benchmarks/demo/model --times 9
    --out build/inflated \\
        --heads benchmarks/demo/heads/early benchmarks/demo/heads/cp

writes build/inflated/model, build/inflated/heads/early and so on. A small trained model
is too cheap to time, and a large random one accepts nothing. Here every channel of the
residual stream, attention head and MLP neuron is repeated, and whatever reads the
repetitions is zero: the weights of the norms past the first copy, the columns of o_proj
and down_proj past the real heads and neurons. A channel and its copies have the mean of
squares of the channel alone, so norms keep their weights and eps, in bfloat16 too (with
zero channels the weights would be multiplied by the square root of a ratio, which
bfloat16 rounds). Logits differ by the order of float additions alone. The vocabulary,
the layers and the head size stay, so the LM head's share of the weights becomes
smaller.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import BaseModel, Field
from safetensors.torch import load_file
from torch import Tensor

from vllm_ppd.benchmarks.storage import BenchError
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import read_json_object, write_json
from vllm_ppd.heads.folder import load_tensors, save_heads
from vllm_ppd.heads.provenance import provenance
from vllm_ppd.heads.target import fingerprint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# How each dimension of a module's weight grows: repeated (+), filled with zeros (0), or
# not at all (-).
RULES = {
    "embed_tokens": "-+",
    "lm_head": "-+",
    "norm": "0",
    "input_layernorm": "0",
    "post_attention_layernorm": "0",
    "q_proj": "++",
    "k_proj": "++",
    "v_proj": "++",
    "q_norm": "-",
    "k_norm": "-",
    "o_proj": "+0",
    "gate_proj": "++",
    "up_proj": "++",
    "down_proj": "+0",
}


class InflateOptions(BaseModel):
    """Options for what to inflate, and how much."""

    model: str = Field(description="folder of a trained model")
    heads: tuple[str, ...] = Field((), description="heads folders of the model")
    times: int = Field(
        ge=2,
        description="times the width; the layers' weights grow by its square",
    )
    out: str = Field(description="folder of model and heads")


def run(options: InflateOptions) -> int:
    """Write everything.

    Raises:
        BenchError, HeadsError: on models outside the Llama family, or heads of another
            width.
    """
    out = Path(options.out)
    inflate_model(Path(options.model), out / "model", options.times)
    for folder in map(Path, options.heads):
        inflate_heads(
            folder, out / "model", out / "heads" / folder.name, options.times
        )
    return 0


def inflate(tensor: Tensor, rule: str, times: int) -> Tensor:
    """The tensor with each dimension repeated or filled up, as its rule says."""
    for dim, growth in enumerate(rule):
        if growth != "-":
            copies = tensor if growth == "+" else torch.zeros_like(tensor)
            tensor = torch.cat([tensor, *[copies] * (times - 1)], dim)
    return tensor


def filled(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with zeros up to a shape."""
    larger = tensor.new_zeros(shape)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


def in_blocks(name: str, tensor: Tensor, size: int, times: int) -> Tensor:
    """A matrix of a recurrent state (heads/cp/module.py) with each of its blocks
    filled up by itself.

    The state and the last hidden state are zero past the first copy, and RMSNorm
    divides by the root of a mean that is `times` smaller: the columns that read them
    are divided by the root of `times`.
    """
    if name in (
        "token",
        "inner",
    ):  # rows: the state, then both halves of the gated layer
        inner = (len(tensor) - size) // 2
        blocks = [
            filled(block, (times * len(block), size))
            for block in tensor.split([size, inner, inner])
        ]
        return torch.cat(blocks) * (times**-0.5 if name == "inner" else 1)
    if (
        name == "fuse"
    ):  # columns: the last hidden state, then those of other layers
        last, *others = (
            filled(block, (size, times * size))
            for block in tensor.split(size, dim=1)
        )
        return torch.cat([last * times**-0.5, *others], dim=1)
    return tensor


def rule_of(name: str) -> str:
    """The rule for a tensor of the target or of a layer like its own; a bias grows like
    its weight's first dimension.
    """
    *_, module, kind = name.split(".")
    return RULES[module][: 1 if kind == "bias" else None]


def inflate_model(model: Path, out: Path, times: int) -> None:
    """Write the inflated model.

    Raises:
        BenchError: if the model is not of the Llama family.
    """
    config = read_json_object(model / "config.json", "pass a model folder")
    if config["model_type"] not in FAMILIES:
        raise BenchError(
            f"{model}: model_type {config['model_type']!r} is not one of "
            f"{', '.join(FAMILIES)}"
        )
    inflated = {
        name: inflate(tensor, rule_of(name), times)
        for file in model.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    heads = config["num_attention_heads"]
    before = {"num_key_value_heads": heads} | config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes = {name: times * before[name] for name in names}
    sizes["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    parameters = sum(tensor.numel() for tensor in inflated.values())
    remade = shutil.ignore_patterns(
        "*.safetensors*", "config.json", "curve.jsonl"
    )
    shutil.copytree(model, out, ignore=remade, dirs_exist_ok=True)
    save_torch_state_dict(inflated, out)
    write_json(out / "config.json", config | sizes)
    facts = {"inflated_from": str(model), "parameters": parameters, **sizes}
    write_json(out / "provenance.json", provenance() | facts)
    print(f"{out}: {parameters:,} parameters, width x {times}")


def inflate_heads(folder: Path, model: Path, out: Path, times: int) -> None:
    """Write heads for the inflated model, without their calibration.

    Layers like the target's grow as these do. What else heads read is normed states,
    which are zero past the first copy, or embeddings, of which they must read one copy,
    and what they hand to the LM head must be zero where its columns are repeated: all
    that is filled up with zeros to the shapes that their configuration declares.

    Args:
        folder: heads of the original model.
        model: the inflated model.
        out: the folder to write.
        times: the width of the inflated model relative to the original.

    Raises:
        HeadsError: if the folder holds no heads of ours, or those of a model of another
            width.
    """
    config, tensors = load_tensors(folder)
    size = config.target.hidden_size
    hidden_size = read_json_object(model / "config.json")["hidden_size"]
    if size * times != hidden_size:
        raise HeadsError(
            f"heads in {str(folder)!r} are for hidden size {size}, not "
            f"{hidden_size // times}"
        )
    changes: dict[str, Any] = {
        "verifier": str(model),
        "target": config.target.model_copy(update={"hidden_size": hidden_size}),
        "fingerprint": fingerprint(model),
    }
    layer = getattr(config, "layer_tensors", {})
    if layer:
        changes["layer_tensors"] = {
            name: [
                n if growth == "-" else times * n
                for n, growth in zip(shape, rule_of(name), strict=True)
            ]
            for name, shape in layer.items()
        }
    if isinstance(config, CPConfig) and config.condition == "recurrent":
        changes["inner_size"] = times * config.inner
    inflated = config.model_copy(update=changes)
    shapes = inflated.shapes()

    def grown(name: str, tensor: Tensor) -> Tensor:
        if config.is_count(name):
            return tensor
        if any(name.endswith(f".{of_layer}") for of_layer in layer):
            return inflate(tensor, rule_of(name), times)
        if "inner_size" in changes:
            tensor = in_blocks(name.rpartition(".")[2], tensor, size, times)
        return filled(tensor, shapes[name])

    save_heads(
        out,
        inflated,
        {name: grown(name, tensor) for name, tensor in tensors.items()},
    )
    write_json(
        out / "provenance.json", provenance() | {"inflated_from": str(folder)}
    )
    print(f"{out}: {inflated.describe()}")
