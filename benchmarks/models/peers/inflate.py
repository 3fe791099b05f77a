# SPDX-License-Identifier: Apache-2.0
"""Peers for an inflated target: the same function at its width, as models/inflate.py makes of our heads.

    python -m vllm_ppd.benchmarks.models.peers.inflate --peers build/peers/medusa build/peers/eagle \\
        --model build/inflated/model --out build/inflated/peers

A draft model grows by the factor of the target, so that it stays as cheap beside it as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.models.inflate import (
    HIDDEN,
    QUERY,
    UNREAD_HIDDEN,
    Checkpoint,
    Rule,
    Widths,
    grow,
    inflate_model,
    parameters,
)

# An EAGLE layer has no input norm whose zeros hide the repeated channels: its own matrices have to be zero there.
EAGLE: dict[str, Rule] = {
    "layers.0.self_attn.q_proj.weight": (QUERY, UNREAD_HIDDEN),
    "layers.0.self_attn.k_proj.weight": ("+key", UNREAD_HIDDEN),
    "layers.0.self_attn.v_proj.weight": ("+key", UNREAD_HIDDEN),
}


def medusa(tensors: dict[str, torch.Tensor], widths: Widths) -> dict[str, torch.Tensor]:
    """Blocks read and write states that are zero past the real channels; LM heads read those."""
    rules: dict[str, Rule] = {
        name: (UNREAD_HIDDEN, HIDDEN) if name.startswith("blocks") else (None, HIDDEN) for name in tensors
    }
    return {name: grow(tensor, name, widths, rules) for name, tensor in tensors.items()}


def eagle(tensors: dict[str, torch.Tensor], widths: Widths) -> dict[str, torch.Tensor]:
    """fc reads the first copy of the embedding and of the state, and writes every copy; so does the layer."""
    grown = {name: grow(t, name, widths, EAGLE) for name, t in tensors.items() if name != "fc.weight"}
    halves = [
        grow(half, "fc", widths, {"fc": (HIDDEN, UNREAD_HIDDEN)}) for half in tensors["fc.weight"].chunk(2, dim=1)
    ]
    return grown | {"fc.weight": torch.cat(halves, dim=1)}


def inflate(folder: Path, target: dict[str, int], out: Path) -> None:
    """Write one peer for a target of such a configuration.

    Raises:
        ValueError: if the widths do not fit.
    """
    config = json.loads((folder / "config.json").read_text())
    times, rest = divmod(target["hidden_size"], config["hidden_size"])
    if rest:
        raise ValueError(
            f"{folder} is of width {config['hidden_size']}, of which {target['hidden_size']} is no multiple"
        )
    widths = Widths(times, target["intermediate_size"])
    tensors = load_file(folder / "model.safetensors")
    config["hidden_size"] = target["hidden_size"]
    if config["model_type"] == "medusa":
        grown = medusa(tensors, widths)
    else:
        grown = eagle(tensors, widths)
        config |= {name: target[name] for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
        config["logit_scale"] = 1 / times  # the LM head reads every copy of the state
    out.mkdir(parents=True, exist_ok=True)
    save_file(grown, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _times(factor: float, own: int) -> int:
    return round(factor * own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="inflated target")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    target = json.loads((args.model / "config.json").read_text())
    told = json.loads((args.model / "provenance.json").read_text())
    original = Path(told["inflated_from"])
    for folder in args.peers:
        out = args.out / folder.name
        try:
            with only_writer(out):
                if (folder / "tokenizer.json").exists():
                    checkpoint = Checkpoint(original)
                    shapes = {name: checkpoint.shape(name) for name in checkpoint.files}
                    neurons = json.loads((original / "config.json").read_text())["intermediate_size"]
                    factor = told["parameters"] / parameters(shapes, Widths(1, neurons))
                    inflate_model(folder, out, partial(_times, factor))
                else:
                    inflate(folder, target, out)
        except (ValueError, OSError) as error:
            sys.exit(f"inflate: {error}")
        print(out)


if __name__ == "__main__":
    main()
