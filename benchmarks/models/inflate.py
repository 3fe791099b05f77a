# SPDX-License-Identifier: Apache-2.0
"""Width inflation: a trained model, its heads and its peers, made N times as large with the same function.

    python -m vllm_ppd.benchmarks.models inflate --model benchmarks/demo/model --parameters 300M --out build/inflated \\
        --heads benchmarks/demo/heads/early benchmarks/demo/heads/cp --peers build/peers/eagle

writes build/inflated/model, build/inflated/heads/early and so on. A small trained model is too cheap to time, and a
large random one accepts nothing. Here every channel of the residual stream, attention head and MLP neuron is
repeated, and whatever reads the repetitions is zero: the weights of the norms past the first copy, the columns of
o_proj and down_proj past the real heads and neurons. A channel and its copies have the mean of squares of the channel
alone, so norms keep their weights and eps, in bfloat16 too (with zero channels the weights would be multiplied by the
square root of a ratio, which bfloat16 rounds). Logits differ by the order of float additions alone. The vocabulary,
the layers and the head size stay, so the LM head's share of the weights becomes smaller.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, Field, model_validator
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typing_extensions import Self

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.training.digests import digest_of_value
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.heads.weights import save_heads

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
REMADE = ("config.json", "curve.jsonl", "provenance.json")  # files of a model that are not copied
NEURON_STEP = 64  # neurons are added in such steps, so that kernels meet sizes they like

# How each dimension grows: repeated ("+") or filled with zeros ("0"), with what it counts; None stays.
HIDDEN, QUERY, KEY, NEURONS = "+hidden", "+query", "+key", "+neurons"
UNREAD_HIDDEN, UNREAD_QUERY, UNREAD_NEURONS = "0hidden", "0query", "0neurons"
Rule = tuple[str | None, ...]
RULES: dict[str, Rule] = {
    "embed_tokens.weight": (None, HIDDEN),
    "lm_head.weight": (None, HIDDEN),
    "norm.weight": (UNREAD_HIDDEN,),
    "input_layernorm.weight": (UNREAD_HIDDEN,),
    "post_attention_layernorm.weight": (UNREAD_HIDDEN,),
    "self_attn.q_proj.weight": (QUERY, HIDDEN),
    "self_attn.k_proj.weight": (KEY, HIDDEN),
    "self_attn.v_proj.weight": (KEY, HIDDEN),
    "self_attn.q_norm.weight": (None,),
    "self_attn.k_norm.weight": (None,),
    "self_attn.o_proj.weight": (HIDDEN, UNREAD_QUERY),
    "mlp.gate_proj.weight": (NEURONS, HIDDEN),
    "mlp.up_proj.weight": (NEURONS, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, UNREAD_NEURONS),
}
# An EAGLE layer has no input norm whose zeros hide the repeated channels: its own matrices have to be zero there.
EAGLE: dict[str, Rule] = {
    "self_attn.q_proj.weight": (QUERY, UNREAD_HIDDEN),
    "self_attn.k_proj.weight": (KEY, UNREAD_HIDDEN),
    "self_attn.v_proj.weight": (KEY, UNREAD_HIDDEN),
    "fc.embedding": (HIDDEN, UNREAD_HIDDEN),
    "fc.state": (HIDDEN, UNREAD_HIDDEN),
}


def count(text: Any) -> Any:
    """300M, 1.5B or 300000000 as a number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(str(text)[-1:].upper())
    return text if unit is None else round(float(text[:-1]) * unit)


class InflateOptions(BaseModel):
    """What is inflated, and how much."""

    model: str = Field(description="folder of a trained model")
    heads: tuple[str, ...] = Field((), description="heads folders of the model")
    peers: tuple[str, ...] = Field((), description="folders of Medusa, EAGLE or a draft model beside the model")
    factor: float | None = Field(None, gt=1, description="times the parameters")
    parameters: Annotated[int, BeforeValidator(count)] | None = Field(None, description="as 300M or 1.5B")
    out: str = Field(description="folder of model, heads and peers")

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if (self.factor is None) == (self.parameters is None):
            raise ValueError("give one of --factor and --parameters")
        return self


class Widths(NamedTuple):
    """Hidden size and attention heads are multiplied by `times`; the MLP gets `neurons`."""

    times: int
    neurons: int

    def grown(self, rule: Rule, shape: list[int]) -> list[int]:
        """The shape of an inflated tensor."""
        return [
            size if growth is None else self.neurons if growth.endswith("neurons") else self.times * size
            for size, growth in zip(shape, rule, strict=True)
        ]

    def inflate(self, tensor: torch.Tensor, rule: Rule) -> torch.Tensor:
        """The tensor with each dimension repeated or filled up, as its rule says."""
        shape = self.grown(rule, list(tensor.shape))
        for dim, size in enumerate(shape):
            if (rule[dim] or "").startswith("+"):
                tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
        return filled(tensor, shape)


def filled(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The tensor with zeros up to a shape."""
    behind = [(0, size - old) for size, old in zip(shape, tensor.shape, strict=True)]
    return functional.pad(tensor, [size for dim in reversed(behind) for size in dim]).contiguous()


def rule_of(name: str, rules: Mapping[str, Rule] = RULES) -> Rule:
    """The rule of a tensor of the target or of a layer like its own; a bias grows as its weight's first dimension.

    Raises:
        BenchError: for a tensor that is not of the Llama family.
    """
    words = name.removesuffix(".bias").split(".")
    ending = ".weight" if name.endswith(".bias") else ""
    for suffix in (".".join(words[start:]) + ending for start in range(len(words))):
        if suffix in rules:
            return rules[suffix][:1] if ending else rules[suffix]
    raise BenchError(f"tensor {name!r} is not one of the Llama family ({', '.join(FAMILIES)}), which alone is inflated")


def run(options: InflateOptions) -> int:
    """Write everything.

    Raises:
        BenchError, HeadsError: on what is not of the Llama family, or of another width.
    """
    out = Path(options.out)
    with writing_folder(out):
        wanted = options.parameters, options.factor
        widths, total, factor = inflate_model(Path(options.model), out / "model", *wanted)
        print(f"{out / 'model'}: {total:,} parameters, width x {widths.times}, {widths.neurons} neurons")
        for folder in map(Path, options.heads):
            inflate_heads(folder, out / "model", out / "heads" / folder.name, widths)
        for folder in map(Path, options.peers):
            inflate_peer(folder, out / "model", out / "peers" / folder.name, widths, factor)
    return 0


def inflate_model(
    model: Path, out: Path, parameters: int | None = None, factor: float | None = None
) -> tuple[Widths, int, float]:
    """Write the inflated model, of at most so many parameters, or times as many.

    Returns:
        Widths, parameters, and how many times as many these are.

    Raises:
        BenchError: if the model is not of the Llama family, or has more parameters.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] not in FAMILIES:
        raise BenchError(f"{model}: model_type {config['model_type']!r} is not one of {', '.join(FAMILIES)}")
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    before = sum(tensor.numel() for tensor in tensors.values())
    widths = choose(shapes, config["intermediate_size"], parameters or round((factor or 1) * before))
    total = _parameters(shapes, widths)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("model*.safetensors*"):
        path.unlink()
    shards: dict[str, list[str]] = {}  # a file a layer and another for the rest: no more is in memory at a time
    for name in tensors:
        words = name.split(".")
        shards.setdefault(words[words.index("layers") + 1] if "layers" in words else "rest", []).append(name)
    for shard, names in shards.items():
        inflated = {name: widths.inflate(tensors[name], rule_of(name)) for name in names}
        save_file(inflated, out / f"model-{shard}.safetensors", metadata={"format": "pt"})
    files = {name: f"model-{shard}.safetensors" for shard, names in shards.items() for name in names}
    write_text(out / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": files}, indent=1))
    heads = config["num_attention_heads"]
    sizes = {
        "hidden_size": widths.times * config["hidden_size"],
        "num_attention_heads": widths.times * heads,
        "num_key_value_heads": widths.times * config.get("num_key_value_heads", heads),
        "intermediate_size": widths.neurons,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    _write_json(out / "config.json", config | sizes)
    for path in model.iterdir():
        if path.is_file() and path.name not in REMADE and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    _write_json(out / "provenance.json", provenance(inflated_from=str(model), parameters=total, **sizes))
    return widths, total, total / before


def choose(shapes: dict[str, list[int]], neurons: int, wanted: int) -> Widths:
    """The widest whole multiple that has no more parameters than wanted; a wider MLP makes up for the rest.

    Raises:
        BenchError: if fewer parameters are wanted than the model has.
    """
    if wanted < (before := _parameters(shapes, Widths(1, neurons))):
        raise BenchError(f"{wanted:,} parameters are fewer than the {before:,} that the model has; ask for more")
    times = 1
    while _parameters(shapes, Widths(times + 1, (times + 1) * neurons)) <= wanted:
        times += 1
    widest, wider = (_parameters(shapes, Widths(times, times * neurons + more)) for more in (0, NEURON_STEP))
    return Widths(times, times * neurons + NEURON_STEP * ((wanted - widest) // (wider - widest)))


def _parameters(shapes: dict[str, list[int]], widths: Widths) -> int:
    """Numbers in the inflated model."""
    return sum(math.prod(widths.grown(rule_of(name), shape)) for name, shape in shapes.items())


def inflate_heads(folder: Path, model: Path, out: Path, widths: Widths) -> None:
    """Write heads for the inflated model, with what the same function leaves of their calibration.

    Layers like the target's grow as these do. What else heads read is normed states, which are zero past the first
    copy, or embeddings, of which they must read one copy, and what they hand to the LM head must be zero where its
    columns are repeated: all that is filled up with zeros to the shapes that their configuration declares.

    Args:
        folder: heads of the original model.
        model: the inflated model.
        out: where to.
        widths: of the inflated model.

    Raises:
        HeadsError: if the folder holds no heads of ours, or those of a model of another width.
    """
    config, tensors = load_tensors(folder)
    made_for = config.target.hidden_size
    hidden_size = json.loads((model / "config.json").read_text())["hidden_size"]
    if made_for * widths.times != hidden_size:
        raise HeadsError(f"heads in {str(folder)!r} are for hidden size {made_for}, not {hidden_size // widths.times}")
    layer = config.layer_shapes or {}
    changes: dict[str, Any] = {
        "verifier": str(model),
        "target": config.target.model_copy(update={"hidden_size": hidden_size}),
        "fingerprint": fingerprint(model),
        "calibration": None,  # of the small model's steps
    }
    if layer:
        changes["layer_tensors"] = {name: widths.grown(rule_of(name), shape) for name, shape in layer.items()}
    inflated = config.model_copy(update=changes)
    shapes = inflated.shapes()

    def grown(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if config.is_count(name):
            return tensor
        if any(name.endswith(f".{of_layer}") for of_layer in layer):
            return widths.inflate(tensor, rule_of(name))
        return filled(tensor, shapes[name])

    save_heads(out, inflated, {name: grown(name, tensor) for name, tensor in tensors.items()})
    _copy_calibration(folder, out)
    _write_json(out / "provenance.json", provenance(inflated_from=str(folder)))
    print(f"{out}: {inflated.describe()}")


def _copy_calibration(folder: Path, out: Path) -> None:
    """All parts but seconds: `ppd calibrate` with the same options then measures these alone."""
    path = folder / "calibration.json"
    if not path.is_file():
        return
    result = json.loads(path.read_text())
    result["options"] |= {"heads": str(out), "model": None}
    result["heads_stamp"] = (out / "model.safetensors").stat().st_mtime_ns
    result["finished"] = False
    result["parts"].pop("timing", None)
    result["digests"] = {name: digest_of_value(part) for name, part in result["parts"].items()}
    result.pop("recommendation", None)  # it weighs acceptance against seconds
    write_text(out / path.name, json.dumps(result, indent=1) + "\n")


def inflate_peer(folder: Path, model: Path, out: Path, widths: Widths, factor: float) -> None:
    """Write a peer for the inflated model; a draft model grows by the same factor, so that it stays as cheap beside it.

    Args:
        folder: peer of the original model.
        model: the inflated model.
        out: where to.
        widths: of the inflated model.
        factor: its parameters over the original's.

    Raises:
        BenchError: if the widths do not fit.
    """
    if (folder / "tokenizer.json").exists():
        inflate_model(folder, out, factor=factor)
        return
    config, target = (json.loads((place / "config.json").read_text()) for place in (folder, model))
    size, hidden_size = config["hidden_size"], target["hidden_size"]
    if widths.times * size != hidden_size:
        raise BenchError(f"{folder} is of width {size}, which is not {hidden_size // widths.times}, the model's")
    tensors = load_file(folder / "model.safetensors")
    if config["model_type"] == "medusa":  # blocks read normed states and write what LM heads read: the first copy
        inflated = {
            name: filled(tensor, [hidden_size if n == size else n for n in tensor.shape])
            for name, tensor in tensors.items()
        }
    else:
        tensors["fc.embedding"], tensors["fc.state"] = tensors.pop("fc.weight").chunk(2, dim=1)
        inflated = {name: widths.inflate(tensor, rule_of(name, RULES | EAGLE)) for name, tensor in tensors.items()}
        inflated["fc.weight"] = torch.cat([inflated.pop("fc.embedding"), inflated.pop("fc.state")], dim=1)
        config |= {name: target[name] for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
        config["logit_scale"] = 1 / widths.times  # the LM head reads every copy of the state
    config["hidden_size"] = hidden_size
    out.mkdir(parents=True, exist_ok=True)
    save_file(inflated, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", config)
    print(out)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")
