# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine runs: its copies of them change, too, and so does
what it says.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, runner_of, start_engine
from methods import METHODS, WITH_RECURRENT
from safetensors.torch import load_file
from updated import change_weights

pytestmark = pytest.mark.engine
MORE = WITH_RECURRENT | {"cp": METHODS["cp"] | {"draft_vocab_size": 100}}


@pytest.fixture(scope="module")
def expected(other_model: Path) -> list[list[int]]:
    return generate(start_engine(other_model, None), prompts(4), greedy())


@pytest.mark.parametrize(
    ("name", "way"), [*product(MORE, ["reload"]), ("cp", "transfer")]
)
def test_output_is_that_of_the_new_weights(
    tiny_model: Factory,
    with_heads: Factory,
    engine: Factory,
    other_model: Path,
    expected: list[list[int]],
    name: str,
    way: str,
) -> None:
    """Drafts are those of the new weights, too."""
    llm = start_engine(tiny_model(), with_heads(MORE[name]))
    before = generate(engine(), prompts(4), greedy())
    assert generate(llm, prompts(4), greedy()) == before
    deferred = getattr(drafter_of(llm), "deferred", None)
    if deferred is not None:  # as if requests were running
        deferred.drafted[:] = True
    change_weights(llm, other_model, way)
    assert deferred is None or not deferred.drafted.any()
    with counting(llm) as seen:
        assert generate(llm, prompts(4), greedy()) == expected
    assert seen["drafted"] > 0
    # vLLM would register it for EPLB a second time, and write a draft model's new
    # weights to it.
    assert runner_of(llm).get_draft_model() is None
    if name == "dynamo":
        drafter = drafter_of(llm).drafter
        torch.testing.assert_close(drafter.tables, drafter.read_tables())
        assert drafter.tables.after.any()
    if name == "cp":
        vocabulary = drafter_of(llm).drafter.vocabulary
        weights = load_file(other_model / "model.safetensors")
        rows = weights["lm_head.weight"][vocabulary.token_ids]
        states = torch.randn(5, 64)
        torch.testing.assert_close(
            vocabulary.logits(states),
            states @ rows.T,
            rtol=1e-4,
            atol=1e-4,
        )
