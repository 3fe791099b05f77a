# SPDX-License-Identifier: Apache-2.0
"""Width inflation: a trained model, and its heads, made N times as large with the same function.

    python -m vllm_ppd.benchmarks.models.inflate --model benchmarks/demo/model --parameters 300M --out build/inflated \\
        --heads benchmarks/demo/heads/early benchmarks/demo/heads/cp benchmarks/demo/heads/dynamo

writes build/inflated/model and build/inflated/heads/early, .../cp. A small trained model is too cheap to time, and a
large random one accepts nothing. Here every channel of the residual stream, attention head and MLP neuron is
repeated, and whatever reads the repetitions is zero: the weights of the norms past the first copy, the columns of
o_proj and down_proj past the real heads and neurons. A channel and its copies have the mean of squares of the channel
alone, so norms keep their weights and eps, in bfloat16 too (with zero channels the weights would be multiplied by the
square root of a ratio, which bfloat16 rounds). Logits differ by the order of float additions alone. The vocabulary,
the layers and the head size stay, so the LM head's share of the weights becomes smaller.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.stored import digest
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.io import HeadsError, load_tensors, save_heads
from vllm_ppd.heads.training.provenance import provenance

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
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
    "self_attn.q_proj.bias": (QUERY,),
    "self_attn.k_proj.weight": (KEY, HIDDEN),
    "self_attn.k_proj.bias": (KEY,),
    "self_attn.v_proj.weight": (KEY, HIDDEN),
    "self_attn.v_proj.bias": (KEY,),
    "self_attn.q_norm.weight": (None,),
    "self_attn.k_norm.weight": (None,),
    "self_attn.o_proj.weight": (HIDDEN, UNREAD_QUERY),
    "self_attn.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (NEURONS, HIDDEN),
    "mlp.gate_proj.bias": (NEURONS,),
    "mlp.up_proj.weight": (NEURONS, HIDDEN),
    "mlp.up_proj.bias": (NEURONS,),
    "mlp.down_proj.weight": (HIDDEN, UNREAD_NEURONS),
    "mlp.down_proj.bias": (HIDDEN,),
    # Heads: what they hand to the LM head must be zero where its columns are repeated.
    "transform": (UNREAD_HIDDEN, HIDDEN),
    "classifier": (None, HIDDEN),
    "cp.gate": (None, HIDDEN),
    "cp.transforms": (None, None, UNREAD_HIDDEN, HIDDEN),
    "cp.classifiers": (None, None, None, HIDDEN),
    # What reads embeddings, which are repeated, reads their first copy alone.
    "cp.token_gate": (None, UNREAD_HIDDEN),
    "cp.token": (None, UNREAD_HIDDEN, UNREAD_HIDDEN),
    "cp.previous": (None, UNREAD_HIDDEN, UNREAD_HIDDEN),
}


@dataclass(frozen=True)
class Widths:
    """Hidden size and attention heads are multiplied by `times`; the MLP gets `neurons`."""

    times: int
    neurons: int

    def grown(self, what: str, size: int) -> int:
        return self.neurons if what == "neurons" else self.times * size


def rule_of(name: str, rules: Mapping[str, Rule] | None = None) -> Rule:
    """The rule of a tensor of a target or of heads; rules go before our own.

    Raises:
        ValueError: for a tensor that is not of the Llama family.
    """
    parts = name.split(".")
    known = RULES | dict(rules or {})
    for suffix in (".".join(parts[start:]) for start in range(len(parts))):
        if suffix in known:
            return known[suffix]
    raise ValueError(f"tensor {name!r} is not one of the Llama family ({', '.join(FAMILIES)}), which alone is inflated")


def grow(tensor: torch.Tensor, name: str, widths: Widths, rules: Mapping[str, Rule] | None = None) -> torch.Tensor:
    """The tensor with each dimension repeated or filled up, as its rule says."""
    for dim, how in enumerate(rule_of(name, rules)):
        if how is None:
            continue
        old = tensor.shape[dim]
        new = widths.grown(how[1:], old)
        if how[0] == "+":
            tensor = tensor.index_select(dim, torch.arange(new) % old)
        else:
            shape = (*tensor.shape[:dim], new - old, *tensor.shape[dim + 1 :])
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor.contiguous()


def grown_shape(shape: list[int], name: str, widths: Widths) -> list[int]:
    return [
        size if how is None else widths.grown(how[1:], size) for size, how in zip(shape, rule_of(name), strict=True)
    ]


class Checkpoint:
    """The tensors of a model folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")

    def shape(self, name: str) -> list[int]:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_slice(name).get_shape()

    def tensor(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def parameters(shapes: dict[str, list[int]], widths: Widths) -> int:
    """Numbers in the inflated model."""
    return sum(int(torch.Size(grown_shape(shape, name, widths)).numel()) for name, shape in shapes.items())


def choose(shapes: dict[str, list[int]], neurons: int, wanted: int) -> Widths:
    """The widest whole multiple that has no more parameters than wanted; a wider MLP makes up for the rest.

    Raises:
        ValueError: if fewer parameters are wanted than the model has.
    """
    if wanted < (own := parameters(shapes, Widths(1, neurons))):
        raise ValueError(f"{wanted:,} parameters are fewer than the {own:,} that the model has; ask for more")
    times = 1
    while parameters(shapes, Widths(times + 1, (times + 1) * neurons)) <= wanted:
        times += 1
    found = Widths(times, times * neurons)
    step = parameters(shapes, Widths(times, found.neurons + NEURON_STEP)) - parameters(shapes, found)
    return Widths(times, found.neurons + NEURON_STEP * ((wanted - parameters(shapes, found)) // step))


def inflate_model(model: Path, out: Path, wanted: Callable[[int], int]) -> tuple[Widths, int]:
    """Write the inflated model; wanted gives its parameters from the model's own. Returns widths and parameters.

    Raises:
        ValueError: if the model is not of the Llama family.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] not in FAMILIES:
        raise ValueError(f"{model}: model_type {config['model_type']!r} is not one of {', '.join(FAMILIES)}")
    checkpoint = Checkpoint(model)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.files}
    neurons = config["intermediate_size"]
    widths = choose(shapes, neurons, wanted(parameters(shapes, Widths(1, neurons))))
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("model*.safetensors*"):
        path.unlink()
    files: dict[str, str] = {}
    for shard, names in _shards(shapes).items():
        files |= dict.fromkeys(names, shard)
        tensors = {name: grow(checkpoint.tensor(name), name, widths) for name in names}
        save_file(tensors, out / shard, metadata={"format": "pt"})
    total = parameters(shapes, widths)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=1))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_attention_heads"]
    grown = {
        "hidden_size": widths.times * config["hidden_size"],
        "num_attention_heads": widths.times * heads,
        "num_key_value_heads": widths.times * config.get("num_key_value_heads", heads),
        "intermediate_size": widths.neurons,
        "head_dim": head_dim,
    }
    (out / "config.json").write_text(json.dumps(config | grown, indent=2) + "\n")
    for path in model.iterdir():
        if path.is_file() and path.name not in ("config.json", "provenance.json") and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    _tell(out, inflated_from=str(model), parameters=total, **grown)
    return widths, total


def _shards(names: Iterable[str]) -> dict[str, list[str]]:
    """A file a layer and one for the rest: no more than that is in memory at a time."""
    files: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        layer = parts[parts.index("layers") + 1] if "layers" in parts else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    return files


def inflate_heads(folder: Path, model: Path, out: Path, widths: Widths) -> HeadsConfig:
    """Write heads for the inflated model; of their calibration what the same function leaves as it is.

    Args:
        folder: heads of the original model.
        model: the inflated model.
        out: where to.
        widths: of the inflated model.

    Raises:
        HeadsError: if the folder holds no heads of ours.
    """
    config, tensors = load_tensors(folder)
    made_for = config.target.hidden_size
    hidden_size = json.loads((model / "config.json").read_text())["hidden_size"]
    if made_for * widths.times != hidden_size:
        raise HeadsError(f"heads in {str(folder)!r} are for hidden size {made_for}, not {hidden_size // widths.times}")
    fixed = ("cooccurrence.", "token_counts")
    grown = {name: t if name.startswith(fixed) else grow(t, name, widths) for name, t in tensors.items()}
    changes: dict[str, Any] = {
        "verifier": str(model),
        "target": config.target.model_copy(update={"hidden_size": hidden_size}),
        "fingerprint": fingerprint(model),
        "calibration": None,  # of the small model's steps
    }
    if isinstance(config, DynaMoConfig):
        changes["layer_tensors"] = {n: grown_shape(s, n, widths) for n, s in config.layer_tensors.items()}
    config = config.model_copy(update=changes)
    save_heads(out, config, grown)
    _copy_calibration(folder, out)
    _tell(out, inflated_from=str(folder))
    return config


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
    result["digests"] = {name: digest(part) for name, part in result["parts"].items()}
    result.pop("recommendation", None)  # it weighs acceptance against seconds
    (out / path.name).write_text(json.dumps(result, indent=1) + "\n")


def _tell(out: Path, **facts: Any) -> None:
    (out / "provenance.json").write_text(json.dumps(provenance(**facts), indent=2) + "\n")


def count(text: str) -> int:
    """300M, 1.5B or 300000000."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1)
    return round(float(text[:-1] if unit != 1 else text) * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--heads", type=Path, nargs="*", default=[], metavar="DIR", help="heads folders of the model")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--factor", type=float, help="times the parameters")
    size.add_argument("--parameters", type=count, help="parameters, as 300M or 1.5B")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    try:
        model = args.out / "model"
        with only_writer(args.out):
            widths, total = inflate_model(args.model, model, lambda own: args.parameters or round(args.factor * own))
            print(f"{model}: {total:,} parameters, width x {widths.times}, {widths.neurons} neurons")
            for folder in args.heads:
                out = args.out / "heads" / folder.name
                print(f"{out}: {inflate_heads(folder, model, out, widths).describe()}")
    except (ValueError, OSError) as error:
        sys.exit(f"inflate: {error}")


if __name__ == "__main__":
    main()
