# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup, row by row beside the method's drafts; the output stays the target's."""

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, results_of, runner_of
from methods import METHODS
from test_drafts_that_pay import follow

from vllm_ppd.vllm_plugins.engine.drafter import DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.lookup import LIMIT

pytestmark = pytest.mark.engine
LOOKUP = {"prompt_lookup_min": 2}  # the default beside heads
REQUESTS = [{"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}, *prompts(2)]
PARAMS = [greedy(32), greedy(32), greedy(32, temperature=0.8, seed=3)]


@pytest.mark.parametrize("name", METHODS)
def test_output_is_the_same_and_more_is_accepted(
    engine: Factory,
    drafting: Factory,
    name: str,
) -> None:
    """Texts that repeat themselves beside others, greedy and sampled."""
    expected = generate(engine(on_v2=True), REQUESTS, PARAMS)
    accepted = []
    for options in ({}, LOOKUP):
        llm = drafting(METHODS[name] | options)
        with counting(llm) as seen:
            assert generate(llm, REQUESTS, PARAMS) == expected
        accepted.append(seen["accepted"])
    assert accepted[1] > accepted[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_drafted_where_nothing_repeats(
    engine: Factory, asynchronous: bool
) -> None:
    """Steps without a match are vLLM's, and drafts come as soon as a request has one."""
    options = {
        "method": "lookup",
        **LOOKUP,
        "adaptive": "table",
        "step_costs": "measure",
    }
    llm = engine(options, async_scheduling=asynchronous)
    follow(llm, 0.001)
    lookup = runner_of(llm).speculator.lookup
    expected = generate(engine(on_v2=True), REQUESTS, PARAMS)
    with counting(llm) as seen:
        assert generate(llm, REQUESTS, PARAMS) == expected
    assert seen["accepted"] > 5 and seen["lookup_steps"] >= 3
    lookup.shortest = 1000  # nothing stands twice
    with counting(llm) as seen:
        assert generate(llm, REQUESTS, PARAMS) == expected
    lookup.shortest = LOOKUP["prompt_lookup_min"]
    assert seen["drafting_off_steps/no_match"] > 15 and seen["drafts"] <= 12


def test_tokens_outside_the_vocabulary_are_not_drafted(
    engine: Factory, drafting: Factory
) -> None:
    """As placeholders of images, which no prompt of a text model may have."""
    llm = drafting(METHODS["cp"] | LOOKUP)
    lookup = runner_of(llm).speculator.lookup
    lookup.vocab_size = 8
    with results_of(lookup, "find", lambda found: found.token_ids.max()) as most:
        answers = generate(llm, REQUESTS, PARAMS)
    assert answers == generate(engine(on_v2=True), REQUESTS, PARAMS)
    lookup.vocab_size = None
    assert most and max(most) == 7


def test_heads_draft_where_texts_mislead(
    drafting: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matches of a single token mean little, and these heads know the answer. Counters
    follow, there and back.
    """
    llm = drafting(METHODS["cp"] | LOOKUP)
    speculator = runner_of(llm).speculator
    lookup = speculator.lookup
    drafts = speculator.num_speculative_steps
    monkeypatch.setattr(lookup, "shortest", 1)
    (request,) = prompts(1)
    params = greedy(120, temperature=1.0, seed=1)
    (answer,) = generate(llm, [request], params)
    # A step scheduled ahead drafts beyond the end
    text = [*request["prompt_token_ids"], *answer, *[0] * 3 * drafts]

    def right(step: DraftInputs) -> Drafts:
        after = int(speculator.staging.staged.positions[0]) + 1
        return Drafts(torch.tensor([text[after : after + drafts]]))

    rates = []
    with monkeypatch.context() as patch:
        patch.setattr(speculator.drafter, "propose", right)
        for always in (True, False):
            lookup.forget()
            patch.setattr(lookup, "alone", always)
            for _ in range(6):
                with counting(llm) as seen:
                    assert generate(llm, [request], params) == [answer]
            rates.append(seen["accepted"] / seen["drafts"])
    assert rates[0] < 0.9 * rates[1] and rates[1] > 0.9 * drafts
    lookup.gains[2:] = -LIMIT
    for _ in range(3):
        generate(llm, REQUESTS, greedy(150))
    assert max(lookup.gains) > 0
    lookup.forget()
