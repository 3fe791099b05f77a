# SPDX-License-Identifier: Apache-2.0
"""Early heads: what they compute, and their folder."""

import torch
from conftest import Factory
from safetensors.torch import load_file

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.io import kind_of, load_tensors


def test_fresh_heads_are_the_untrained_exit() -> None:
    hidden = torch.randn(4, 16)
    assert torch.equal(EarlyHeads([2, 5], 16)(hidden, 5), hidden)


def test_head_is_lm_head_times_transform() -> None:
    """softmax(E* T h) is what a full head E^(i) = E* T^(i) computes (ParaDecode, section 2.1)."""
    torch.manual_seed(0)
    lm_head = torch.randn(50, 16)
    hidden = torch.randn(4, 16)
    heads = EarlyHeads([3], 16)
    transform = torch.randn(16, 16)
    heads.weights["3"].data.copy_(transform)
    torch.testing.assert_close(
        heads(hidden, 3) @ lm_head.T, hidden @ (lm_head @ transform).T
    )


def test_round_trip(heads_folder: Factory) -> None:
    folder = heads_folder(exit_layers=(2, 4), noise=0.1)
    config, tensors = load_tensors(folder, EarlyConfig)
    heads = EarlyHeads.from_tensors(config, tensors)
    assert kind_of(folder) == "early"
    assert (config.exit_layers, config.num_speculative_tokens) == ([2, 4], 2)
    assert torch.equal(
        heads.weights["4"], load_file(folder / "model.safetensors")["exit.4.transform"]
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
