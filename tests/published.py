# SPDX-License-Identifier: Apache-2.0
"""Tiny random speculators in the layouts of IBM and Snowflake, and what they draft,
written from their description.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu

# Of the tiny llama
HIDDEN = 64
VOCAB = 320
IBM = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": HIDDEN,
    "inner_dim": 24,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "tie_weights": False,
    "scale_input": False,
    "torch_dtype": "float32",
}
ARCTIC = {
    "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
    "method": "sum_rnn",
    "model_type": "mlp_speculator",
    "base_model_name_or_path": "",
    "input_hidden_dim": HIDDEN,
    "inner_dim": "24",
    "emb_dim": "24",
    "proj_dim": "24",
    "n_predict": 3,
    "tie_weights": False,
    "scale_input": True,
    "torch_dtype": "bfloat16",
}
LSTM = ARCTIC | {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "method": "sum_lstm",
    "tie_weights": True,
    "tie_lstm_embs": True,
}
FIVE = {"n_predict": 5, "scale_input": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ibm": IBM,
    "ibm-5-tied": IBM | FIVE | {"inner_dim": 0, "tie_weights": True},
    "ibm-5": IBM | FIVE | {"inner_dim": 40},
    "arctic-mlp": ARCTIC,
    "arctic-mlp-tied": ARCTIC | {"tie_weights": True, "scale_input": False},
    "arctic-lstm": LSTM,
    "arctic-lstm-5": LSTM | FIVE | {"tie_lstm_embs": False, "scale_input": False},
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
    lstm = config.get("method") == "sum_lstm"
    nested = ".0" if config.get("method") == "sum_rnn" else ""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors: dict[str, torch.Tensor] = {}
    stages = range(1 if tied else n)
    for gate in [f"{gate}_" for gate in GATES] if lstm else [""]:
        for i in range(min(n, 2) if tied else n):
            name = f"{gate}proj.{i}{nested}.weight"
            tensors[name] = random(width, hidden if i == 0 else width)
        for i in stages:
            name = f"{gate}emb.{i}{nested}.weight"
            first = tensors.get(f"forget_emb.{i}{nested}.weight")
            if first is None or not config["tie_lstm_embs"]:
                tensors[name] = random(vocab, width)
            else:
                tensors[name] = first.clone()
    for i in stages:
        for norm in ("cell_ln", "state_ln") if lstm else ("ln",):
            tensors[f"{norm}.{i}{nested}.weight"] = (
                1 + 0.3 * random(width, 1)[:, 0]
            )
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
    size = (
        "input_hidden_dim" if "input_hidden_dim" in LAYOUTS[layout] else "emb_dim"
    )
    config = LAYOUTS[layout] | {"vocab_size": vocab, size: hidden}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        prefix + name: tensor.to(dtype)
        for name, tensor in weights_of(config).items()
    }
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
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
    # Arctic's layers are nested: proj.0.0.weight.
    nested = re.compile(r"(\w+\.\d+)\.0(\.\w+)")
    tensors = {nested.sub(r"\1\2", name): tensors[name] for name in tensors}
    w = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - w * w) * width / 2) / w

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    state = rms(hidden) / math.sqrt(2) if config["scale_input"] else hidden
    cell = torch.zeros(width)
    for i, token in enumerate(tokens):
        stage = 0 if config["tie_weights"] else i
        place = min(i, 1) if config["tie_weights"] else i

        def norm(name: str, x: torch.Tensor, stage: int = stage) -> torch.Tensor:
            weight = tensors[f"{name}.{stage}.weight"]
            return rms(x) * weight + tensors[f"{name}.{stage}.bias"]

        read = {
            gate: tensors[f"{gate}proj.{place}.weight"] @ state
            + alpha * tensors[f"{gate}emb.{stage}.weight"][token]
            for gate in ([f"{gate}_" for gate in GATES] if lstm else [""])
        }
        if lstm:
            write = (
                gelu(norm("cell_ln", read["cell_"])) * read["input_"].sigmoid()
            )
            cell = cell * read["forget_"].sigmoid() + write
            state = gelu(norm("state_ln", cell)) * read["output_"].sigmoid()
        else:
            state = gelu(norm("ln", read[""]))
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
        *_, (logits, _) = states(
            config,
            tensors,
            hidden,
            tokens,
        )
        tokens.append(int(logits.argmax()))
    return tokens[1:]
