# SPDX-License-Identifier: Apache-2.0
"""The number of drafts on runner V2: vLLM's scheduler takes none where drafts do not pay."""

import itertools
from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, full_but, our_log, runner_of
from small import METHODS

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, MeasuredCosts, StepCosts
from vllm_ppd.vllm_plugins.draft_length.repeated_text import RepeatedText
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts
from vllm_ppd.vllm_plugins.engine.v2 import dummy_steps, worker

pytestmark = pytest.mark.engine


def lookup_of(llm: Any) -> ScheduledDrafts:
    """What an engine's scheduler looks the number of drafts up in."""
    lookup = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    assert isinstance(lookup, ScheduledDrafts)
    return lookup


def follow(llm: Any, share: float) -> ScheduledDrafts:
    """Have an engine choose anew by steps whose drafts cost a share of a step each."""
    lookup = lookup_of(llm)
    lookup.follow(StepCosts(CostTable(sizes=[1, 4], counts=[0, lookup.drafts], seconds=[[1.0, 1 + share]] * 2)))
    return lookup


@pytest.mark.parametrize(
    ("name", "asynchronous"), full_but({("cp", True), ("early", False)}, itertools.product(METHODS, (False, True)))
)
def test_drafts_that_never_pay_are_not_made(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, name: str, asynchronous: bool
) -> None:
    """The output is vLLM's, and drafts come back where they begin to pay."""
    monkeypatch.setattr(dummy_steps, "TIMED", 1)
    llm, requests = v2_engine({**METHODS[name], "adaptive": True, "step_costs": "measure"}, asynchronous), prompts(2)
    expected = generate(v2_engine(), requests, greedy(64, ignore_eos=True))
    follow(llm, 100.0)
    with counting(llm) as seen:
        assert generate(llm, requests, greedy(64, ignore_eos=True)) == expected
    assert seen["drafts"] <= 16 and seen["drafting_off_steps/cost"] > 50
    assert seen["suppressed_drafts"] > 50 * lookup_of(llm).drafts
    follow(llm, 0.001)
    with counting(llm) as seen:
        assert generate(llm, requests, greedy(30, ignore_eos=True)) == [tokens[:30] for tokens in expected]
    assert seen["accepted"] > 5 and not seen["drafting_off_steps/cost"]


def test_heads_that_are_predicted_to_gain_nothing_are_named(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy_steps, "TIMED", 1)
    llm = v2_engine({**METHODS["cp"], "adaptive": True, "step_costs": "measure"}, True)
    dear = MeasuredCosts(method=CostTable(sizes=[1, 4], counts=[0, lookup_of(llm).drafts], seconds=[[1.0, 9.0]] * 2))
    monkeypatch.setattr(worker, "costs_of_engine", lambda *args: dear)
    with our_log() as messages:
        llm.collective_rpc("step_costs")
    assert len(messages) == 1 and "predicted to gain nothing at every batch size (1, 4): at best 0." in messages[0]


def test_a_step_without_drafts_is_vllms(v2_engine: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of ours beside vLLM's own, and its sampler in place of verification."""
    monkeypatch.setattr(dummy_steps, "TIMED", 1)
    llm = v2_engine({**METHODS["cp"], "adaptive": True, "step_costs": "measure"}, True)
    lookup, runner = follow(llm, 0.001), runner_of(llm)
    lookup.limit = 0
    calls: list[str] = []
    for owner, call in ((runner.speculator, "propose"), (runner.rejection_sampler, "__call__"),
                        (runner.draft_tokens_handler, "set_draft_tokens")):  # fmt: skip
        monkeypatch.setattr(type(owner), call, lambda *args, at=call, **kwargs: calls.append(at))
    try:
        generate(llm, prompts(2), greedy(8))
    finally:
        lookup.limit = None
    assert calls == []


@pytest.mark.parametrize("asynchronous", full_but({True}, (False, True)))
def test_engines_with_the_same_costs_choose_the_same(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Whatever their steps take: a choice reads acceptance, texts and the table."""
    monkeypatch.setattr(dummy_steps, "TIMED", 1)
    options = {**METHODS["cp"], "prompt_lookup_min": 2, "adaptive": True, "step_costs": "measure"}
    stock, chosen, said = ScheduledDrafts.__getitem__, [], []
    for _ in range(2):
        llm, choices = v2_engine(options, asynchronous), []
        lookup = follow(llm, 3.0)
        lookup._req_ids, lookup.texts = [], RepeatedText(2)  # as in an engine that has just started

        def choose(self: ScheduledDrafts, requests: int, to: list[int] = choices) -> int:
            to.append(stock(self, requests))
            return to[-1]

        monkeypatch.setattr(ScheduledDrafts, "__getitem__", choose)
        said.append(generate(llm, prompts(3), greedy(40, ignore_eos=True)))
        chosen.append(choices)
    assert chosen[0] == chosen[1] and said[0] == said[1] and len(set(chosen[0])) == 2
