# SPDX-License-Identifier: Apache-2.0
"""Early heads: where they start, what they compute, and their folder."""

import torch
from conftest import Factory
from overfitted import untrained
from safetensors.torch import load_file

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.folder import kind_of, load_tensors


def test_fresh_heads_are_the_untrained_exit(tiny_model: Factory) -> None:
    heads = untrained(tiny_model(), "early", exit_layers=(5, 2)).heads
    hidden = torch.randn(4, 64)
    assert heads.exit_layers == (2, 5) and torch.equal(heads(hidden, 5), hidden)


def test_head_is_lm_head_times_transform(heads_folder: Factory) -> None:
    """softmax(E* T h) is what a full head E^(i) = E* T^(i) computes (ParaDecode, section 2.1)."""
    folder = heads_folder(exit_layers=(2, 4), noise=0.1)
    assert kind_of(folder) == "early"
    heads = EarlyHeads(*load_tensors(folder, EarlyConfig))
    transform = load_file(folder / "model.safetensors")["exit.4.transform"]
    torch.manual_seed(0)
    lm_head = torch.randn(50, 64)
    hidden = torch.randn(4, 64)
    expected = hidden @ (lm_head @ transform).T
    torch.testing.assert_close(heads(hidden, 4) @ lm_head.T, expected)
