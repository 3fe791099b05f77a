# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine runs, on runner V2: copies follow, and nobody takes the target for a draft."""

from pathlib import Path

import heads_folders
import pytest
import tiny
import torch
from cases import generate, greedy
from conftest import Factory, counting, runner_of, start_engine
from safetensors.torch import load_file
from updated import WAYS, change_weights

pytestmark = pytest.mark.engine
REQUESTS = [{"prompt_token_ids": [7, 40, 3, 99, 12]}]


def test_draft_vocabulary_and_output_follow(tiny_model: Factory, tmp_path: Path) -> None:
    heads = heads_folders.make_heads(tmp_path / "heads", "cp", tiny_model())
    options = {"method": "cp", "model": str(heads), "draft_vocab_size": 100, "runner": "v2", "adaptive": False}
    llm = start_engine(tiny_model(), options, max_num_seqs=4)
    vocabulary = runner_of(llm).speculator.host.drafter.vocabulary
    states = torch.randn(5, 64)
    for seed, way in enumerate(WAYS, start=1):
        other = tiny.make_model(tmp_path / way, seed=seed)
        change_weights(llm, other, way)
        expected = states @ load_file(other / "model.safetensors")["lm_head.weight"].T
        torch.testing.assert_close(vocabulary.logits(states), expected[:, vocabulary.token_ids], rtol=1e-4, atol=1e-4)
        with counting(llm) as seen:
            said = generate(llm, REQUESTS, greedy(8))
        assert said == generate(start_engine(other, None), REQUESTS, greedy(8))
        assert seen["drafted"] > 0


def test_target_is_no_draft_model(tiny_model: Factory) -> None:
    """vLLM would register it for EPLB a second time, and write a draft model's new weights to it."""
    options = {"method": "ppd", "exit_layer": 2, "runner": "v2", "adaptive": False}
    llm = start_engine(tiny_model(), options, max_num_seqs=4)
    assert runner_of(llm).get_draft_model() is None
