# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup on runner V2, row by row beside the method's drafts."""

import numpy as np
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, full_but, runner_of
from small import METHODS
from test_v2_draft_length import follow, lookup_of

from vllm_ppd.vllm_plugins.drafting.prompt_lookup import find
from vllm_ppd.vllm_plugins.engine.drafter import LookedUp

pytestmark = pytest.mark.engine
LOOKUP = {"prompt_lookup_min": 2}
REPEATED = {"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", full_but({"cp", "early"}, ("cp", "early", "dynamo")))
def test_output_is_the_same_and_more_is_accepted(v2_engine: Factory, name: str, asynchronous: bool) -> None:
    """Texts that repeat themselves beside others, greedy and sampled."""
    repeated = [REPEATED, *prompts(2)]
    params = [greedy(32), greedy(32), greedy(32, temperature=0.8, seed=3)]
    expected, accepted = generate(v2_engine(), repeated, params), []
    for options in ({}, LOOKUP):
        llm = v2_engine({**METHODS[name], **options}, asynchronous)
        with counting(llm) as seen:
            assert generate(llm, repeated, params) == expected
        accepted.append(seen["accepted"])
    assert accepted[1] > accepted[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lookups_alone_are_accepted(v2_engine: Factory, asynchronous: bool) -> None:
    requests, params = [REPEATED, *prompts(2)], [greedy(32), greedy(32), greedy(32, temperature=0.8, seed=3)]
    expected = generate(v2_engine(), requests, params)
    llm = v2_engine({"method": "ppd", "prompt_lookup_min": 2}, asynchronous)
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert seen["accepted"] > 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_drafted_where_nothing_repeats(v2_engine: Factory, asynchronous: bool) -> None:
    """Steps without a match are vLLM's, and drafts come as soon as a request has one."""
    llm = v2_engine({"method": "lookup", "adaptive": True, "step_costs": "measure"}, asynchronous)
    follow(llm, 0.001)
    texts = lookup_of(llm).texts
    assert texts is not None
    expected = generate(v2_engine(), [REPEATED, *prompts(2)], greedy(24, ignore_eos=True))
    with counting(llm) as seen:
        assert generate(llm, [REPEATED], greedy(24, ignore_eos=True)) == expected[:1]
    assert seen["accepted"] > 5 and seen["lookup_steps"] >= 3
    texts.shortest = 1000  # nothing stands twice
    with counting(llm) as seen:
        assert generate(llm, prompts(2), greedy(24, ignore_eos=True)) == expected[1:]
    assert seen["drafting_off_steps/no_match"] > 15 and seen["drafts"] <= 8
    assert not texts.repeats([]) and len(texts._seen) <= 2  # ended requests are forgotten


def test_the_longest_match_is_taken_and_the_methods_drafts_elsewhere(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = v2_engine({**METHODS["cp"], **LOOKUP})
    speculator, states = runner_of(llm).speculator, runner_of(llm).req_states
    stock = speculator.host.draft_on_device
    rows_seen = [0, 0]

    def draft_on_device(requests: int, sampled: bool, looked_up: LookedUp) -> None:
        stock(requests, sampled)
        own_drafts = speculator.draft_tokens[:requests].clone()
        stock(requests, sampled, looked_up)
        rows = speculator.host.staging.rows[:requests].tolist()
        for row, own, drafts in zip(rows, own_drafts, speculator.draft_tokens, strict=False):
            if row < 0:
                continue
            text = states.all_token_ids.gpu[row, : int(states.total_len.gpu[row])].numpy()[None]
            match = find(text, np.array([text.shape[1]]), 2, len(drafts))
            count = int(match.counts[0])
            rows_seen[int(count > 0)] += 1
            if not count:
                assert torch.equal(own, drafts)
            elif match.lengths[0] < 8 and (text[0, :-1] == text[0, -1]).sum() == 1:  # one place alone
                assert drafts[:count].tolist() == match.tokens[0, :count].tolist()

    monkeypatch.setattr(speculator.host, "draft_on_device", draft_on_device)
    generate(llm, [{"prompt_token_ids": [5, 17, 230, 41, 9, 77, 12] * 3}, *prompts(2)], greedy(12))
    assert min(rows_seen) > 3
