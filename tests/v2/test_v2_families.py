# SPDX-License-Identifier: Apache-2.0
"""Every supported family on runner V2, on a tiny random model: greedy output is vLLM's, and drafts are accepted."""

import pytest
import tiny
from cases import CASES
from conftest import Factory, counting, full_but, runner_of, start_engine
from test_families import CUT_QUICKLY, DYNAMO, SEPARATE_PROCESS, ran_elsewhere

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", full_but(CUT_QUICKLY, tiny.FAMILIES))
def test_early_drafting(family: str, alone: Factory, tiny_model: Factory, request: pytest.FixtureRequest) -> None:
    if family in SEPARATE_PROCESS and ran_elsewhere(request):
        return
    expected = alone("batch_16", family=family), alone("arrivals_and_aborts", family=family)
    options = {"method": "ppd", "exit_layer": 4, "runner": "v2", "adaptive": False}
    llm = start_engine(tiny_model(family), options)
    with counting(llm) as seen:
        assert (CASES["batch_16"](llm), CASES["arrivals_and_aborts"](llm)) == expected
    assert seen["accepted"] > 0 and seen["deferred_steps"] > 5
    assert runner_of(llm).speculator.cut.exit_layers == (4,)


@pytest.mark.parametrize("family", full_but({"gemma3"}, DYNAMO))  # it has two KV cache groups
def test_token_heads(
    family: str, engine: Factory, alone: Factory, fitted_heads: Factory, request: pytest.FixtureRequest
) -> None:
    if family in SEPARATE_PROCESS and ran_elsewhere(request):
        return
    expected = alone("batch_16", family=family), alone("arrivals_and_aborts", family=family)
    options = {"method": "dynamo", "model": fitted_heads("dynamo", family), "eps_b": 0.0, "runner": "v2"}
    llm = engine({**options, "adaptive": False}, family=family)
    with counting(llm) as seen:
        assert (CASES["batch_16"](llm), CASES["arrivals_and_aborts"](llm)) == expected
    assert seen["accepted"] > 0
