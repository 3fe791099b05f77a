# SPDX-License-Identifier: Apache-2.0
"""Tiny random speculators in the layouts of IBM and Snowflake, and what they draft,
written from their description.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Of the tiny llama
HIDDEN = 64
VOCAB = 320
IBM = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": HIDDEN,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "torch_dtype": "float32",
}
ARCTIC = {
    "model_type": "mlp_speculator",
    "base_model_name_or_path": "",
    "input_hidden_dim": HIDDEN,
    "inner_dim": "24",
    "emb_dim": "24",
    "proj_dim": "24",
    "torch_dtype": "bfloat16",
}
LSTM = ARCTIC | {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "method": "sum_lstm",
    "tie_weights": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ibm": IBM
    | {"inner_dim": 24, "n_predict": 3, "tie_weights": False, "scale_input": False},
    "ibm-5-tied": IBM
    | {"inner_dim": 0, "n_predict": 5, "tie_weights": True, "scale_input": True},
    "ibm-5": IBM
    | {"inner_dim": 40, "n_predict": 5, "tie_weights": False, "scale_input": True},
    "arctic-mlp": ARCTIC
    | {
        "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
        "method": "sum_rnn",
        "n_predict": 3,
        "tie_weights": False,
        "scale_input": True,
    },
    "arctic-mlp-tied": ARCTIC
    | {
        "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
        "method": "sum_rnn",
        "n_predict": 3,
        "tie_weights": True,
        "scale_input": False,
    },
    "arctic-lstm": LSTM | {"n_predict": 3, "tie_lstm_embs": True, "scale_input": True},
    "arctic-lstm-5": LSTM
    | {"n_predict": 5, "tie_lstm_embs": False, "scale_input": False},
}
GATES = ("forget", "input", "output", "cell")


def width_of(config: dict[str, Any]) -> int:
    """The width of a state."""
    return int(config["inner_dim"]) or int(config["emb_dim"])


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by the names that the layout has."""
    n = config["n_predict"]
    width = width_of(config)
    tied = config["tie_weights"]
    hidden = config.get("input_hidden_dim", config["emb_dim"])
    vocab = config.get("vocab_size", VOCAB)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    nested = ".0" if config.get("method") == "sum_rnn" else ""
    gates = (
        [f"{gate}_" for gate in GATES] if config.get("method") == "sum_lstm" else [""]
    )
    tensors: dict[str, torch.Tensor] = {}
    for gate in gates:
        for i in range(min(n, 2) if tied else n):
            tensors[f"{gate}proj.{i}{nested}.weight"] = random(
                width, hidden if i == 0 else width
            )
        for i in range(1 if tied else n):
            first = (
                tensors.get(f"forget_emb.{i}{nested}.weight")
                if config.get("tie_lstm_embs")
                else None
            )
            tensors[f"{gate}emb.{i}{nested}.weight"] = (
                random(vocab, width) if first is None else first.clone()
            )
    for i in range(1 if tied else n):
        for norm in ("cell_ln", "state_ln") if len(gates) > 1 else ("ln",):
            tensors[f"{norm}.{i}{nested}.weight"] = 1 + 0.3 * random(width, 1)[:, 0]
            tensors[f"{norm}.{i}{nested}.bias"] = 0.3 * random(width, 1)[:, 0]
        tensors[f"head.{i}.weight"] = 3 * random(vocab, width)
    return tensors


def publish(
    folder: Path,
    layout: str,
    prefix: str = "",
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
) -> Path:
    """Write a folder as its publisher does, for a target of some sizes."""
    size = "input_hidden_dim" if "input_hidden_dim" in LAYOUTS[layout] else "emb_dim"
    config = LAYOUTS[layout] | {"vocab_size": vocab, size: hidden}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        prefix + name: tensor.to(dtype) for name, tensor in weights_of(config).items()
    }
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
    if shards > 1:
        places = {name: files[i % shards] for i, name in enumerate(names)}
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def states(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    tokens: list[int],
) -> Any:
    """(Logits, state) after each of some tokens, from the target's state [d], by the
    formulas as they stand.
    """
    n = config["n_predict"]
    width = width_of(config)
    lstm = config.get("method") == "sum_lstm"
    tensors = {
        name.replace(".0.weight", ".weight").replace(".0.bias", ".bias")
        if name.count(".") == 3
        else name: value
        for name, value in tensors.items()
    }
    w = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - w * w) * width / 2) / w

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    state = rms(hidden) / math.sqrt(2) if config["scale_input"] else hidden
    cell = torch.zeros(width)
    for i, token in enumerate(tokens):
        stage = 0 if config["tie_weights"] else i
        place = min(i, 1) if config["tie_weights"] else i

        def read(
            gate: str,
            i: int = stage,
            p: int = place,
            s: torch.Tensor = state,
            x: int = token,
        ) -> torch.Tensor:
            return (
                tensors[f"{gate}proj.{p}.weight"] @ s
                + alpha * tensors[f"{gate}emb.{i}.weight"][x]
            )

        def norm(name: str, x: torch.Tensor, i: int = stage) -> torch.Tensor:
            return rms(x) * tensors[f"{name}.{i}.weight"] + tensors[f"{name}.{i}.bias"]

        if lstm:
            forget, write, output = (
                torch.sigmoid(read(f"{gate}_")) for gate in GATES[:3]
            )
            cell = cell * forget + gelu(norm("cell_ln", read("cell_"))) * write
            state = gelu(norm("state_ln", cell)) * output
        else:
            state = gelu(norm("ln", read("")))
        yield tensors[f"head.{stage}.weight"] @ state, state


def drafts(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    first: int,
    count: int,
) -> list[int]:
    """Greedy drafts after a token that the target gave from a state [d]."""
    tokens = [first]
    for _ in range(count):
        *_, (logits, _) = states(config, tensors, hidden, tokens)
        tokens.append(int(logits.argmax()))
    return tokens[1:]
