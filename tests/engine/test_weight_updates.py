# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine runs: its copies of them change, too, and so does
what it says.
"""

from pathlib import Path

import pytest
import tiny
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, runner_of, start_engine
from methods import METHODS
from safetensors.torch import load_file
from updated import WAYS, change_weights

pytestmark = pytest.mark.engine
RECURRENT = ("recurrent", {"tie_weights": False})
MORE = METHODS | {
    "cp": {"method": "cp", "draft_vocab_size": 100, "heads": ("cp", {})},
    "recurrent": {
        "method": "recurrent",
        "draft_vocab_size": 100,
        "heads": RECURRENT,
    },
}


@pytest.fixture(scope="module")
def other(made_once: Factory) -> Path:
    """A model of the tiny llama's sizes with other weights."""
    return made_once(
        "llama-other", lambda folder: tiny.make_model(folder, seed=1)
    )


@pytest.mark.parametrize("way", WAYS)
def test_draft_vocabulary_follows(
    tiny_model: Factory,
    with_heads: Factory,
    other: Path,
    way: str,
) -> None:
    llm = start_engine(tiny_model(), with_heads(MORE["cp"]))
    vocabulary = drafter_of(llm).drafter.vocabulary
    states = torch.randn(5, 64)
    for model in (tiny_model(), other):
        lm_head = load_file(model / "model.safetensors")["lm_head.weight"]
        expected = states @ lm_head[vocabulary.token_ids].T
        torch.testing.assert_close(
            vocabulary.logits(states),
            expected,
            rtol=1e-4,
            atol=1e-4,
        )
        change_weights(llm, other, way)


@pytest.mark.parametrize("name", MORE)
def test_output_is_that_of_the_new_weights(
    tiny_model: Factory,
    with_heads: Factory,
    engine: Factory,
    other: Path,
    name: str,
) -> None:
    llm = start_engine(tiny_model(), with_heads(MORE[name]))
    before = generate(engine(), prompts(4), greedy())
    assert generate(llm, prompts(4), greedy()) == before
    change_weights(llm, other, "reload")
    after = generate(start_engine(other, None), prompts(4), greedy())
    with counting(llm) as seen:
        assert generate(llm, prompts(4), greedy()) == after
    assert seen["drafted"] > 0
    # vLLM would register it for EPLB a second time, and write a draft model's new
    # weights to it.
    assert runner_of(llm).get_draft_model() is None
