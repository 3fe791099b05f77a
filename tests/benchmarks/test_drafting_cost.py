# SPDX-License-Identifier: Apache-2.0
"""What drafts cost in passes of the target, by the weights that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_folders import make_heads
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.papers.drafting_cost import costs

N = 2  # drafts
PEERS = ("eagle", "medusa")


def passes(model: Path, own: float, layers: int, lm_heads: float) -> Any:
    """Numbers of their own, layers of the target and reads of its LM head, in passes."""
    tensors = load_file(model / "model.safetensors")
    layer = sum(tensor.numel() for name, tensor in tensors.items() if "layers.0." in name)
    lm_head = tensors["lm_head.weight"].numel()
    whole = AutoConfig.from_pretrained(model).num_hidden_layers * layer + lm_head
    return pytest.approx((own + layers * layer + lm_heads * lm_head) / whole, abs=1e-4)


@pytest.mark.parametrize("condition", ["none", "token", "chain"])
@pytest.mark.parametrize("vocabulary", [None, 100])
def test_cp(tiny_model: Callable[..., Path], tmp_path: Path, condition: str, vocabulary: int | None) -> None:
    """All of the checkpoint, and the LM head's rows once, or once a draft."""
    model = tiny_model()
    heads = make_heads(tmp_path / "heads", "cp", model, rank=3, condition=condition)
    config = {
        "model": str(heads),
        "num_speculative_tokens": N,
        **({"draft_vocab_size": vocabulary} if vocabulary else {}),
    }
    own = sum(tensor.numel() for name, tensor in load_file(heads / "model.safetensors").items() if "cp." in name)
    size = AutoConfig.from_pretrained(model).vocab_size
    share = (vocabulary or size) / size * (N if condition == "chain" else 1)
    assert costs([Contender("vLLM"), Contender("cp", config)], str(model)) == {"cp": passes(model, own, 0, share)}
    # One draft needs fewer positions than the head has.
    one = costs([Contender("cp", config | {"num_speculative_tokens": 1})], str(model))["cp"]
    saved = {"none": 3, "token": 3 + 1, "chain": 3 + 1 + 1}[condition] * 64**2
    assert one == passes(model, own - saved, 0, share / (N if condition == "chain" else 1))


def test_layers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model()
    options = {"num_speculative_tokens": N}
    everyone = [
        Contender(kind, {"model": str(make_heads(tmp_path / kind, kind, model)), **options})
        for kind in ("early", "dynamo")
    ]
    found = costs(everyone, str(model))
    assert found == {"early": passes(model, N * 64**2, N * 4, N), "dynamo": passes(model, 0, N, 1)}


def test_peers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model()
    size = AutoConfig.from_pretrained(model).vocab_size
    save_file({"fc": torch.zeros(7, 11), "lm_head": torch.zeros(size, 3)}, tmp_path / "model.safetensors")
    everyone = [Contender(name, {"method": name, "model": str(tmp_path)}) for name in PEERS]
    everyone.append(Contender("ngram", {"method": "ngram"}))
    for contender in everyone:
        assert contender.speculative_config is not None
        contender.speculative_config["num_speculative_tokens"] = N
    expected = {"eagle": passes(model, N * 77, 0, N), "medusa": passes(model, 77, 0, N), "ngram": 0.0}
    assert costs(everyone, str(model)) == expected


def test_what_is_not_counted(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing of it, and the others are: vLLM's other methods, drafts of several exits. An exit may be another one."""
    model = tiny_model()
    heads = {"model": str(make_heads(tmp_path / "early", "early", model)), "num_speculative_tokens": N}
    others: dict[str, dict[str, Any]] = {
        "suffix": {"method": "suffix"},
        "eagle3": {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": N},
        "draft model": {"method": "draft_model", "model": str(model), "num_speculative_tokens": N},
        "no heads": {"method": "ppd", "num_speculative_tokens": N},
        "exits": heads | {"exit_layer": [2, 4]},
        "exit 2": heads | {"method": "ppd", "exit_layer": 2},
    }
    found = costs([Contender(name, config) for name, config in others.items()], str(model))
    assert found == {"exit 2": passes(model, N * 64**2, N * 2, N)}


def test_targets_that_are_not_counted(tiny_model: Callable[..., Path]) -> None:
    ngram = Contender("ngram", {"method": "ngram", "num_speculative_tokens": N})
    assert costs([ngram], str(tiny_model("mixtral"))) == {}
