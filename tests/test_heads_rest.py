# SPDX-License-Identifier: Apache-2.0
"""DynaMo's heads in engines: when they rest, and what they say once they have caught up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import drafter_of, our_counter, runner_of
from exactness import CASES, generate, greedy, prompts
from vllm import SamplingParams

from vllm_ppd.vllm_plugins import catch_up_budget
from vllm_ppd.vllm_plugins.adaptive.drafts import AdaptiveDrafts
from vllm_ppd.vllm_plugins.catch_up_budget import MOST_WON, CatchUpBudget
from vllm_ppd.vllm_plugins.passes import consecutive
from vllm_ppd.vllm_plugins.states import flat_ranges

CUT_OFF = 2


@pytest.mark.engine
def test_heads_rest_in_batches_above_the_cut_off(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts included; who was there drafts once the crowd is gone, and so does whoever goes on from it."""
    options = {"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "disable_by_batch_size": CUT_OFF}
    llm = engine(options, enable_prefix_caching=True)
    drafter, runner = drafter_of(llm), runner_of(llm)
    original, branches, passes = drafter.draft, drafter.cut.branches, drafter.passes.branches
    ran: Counter[str] = Counter()
    # ({length of the prompt: drafts made}, branches run in the step, tokens that they caught up with)
    steps: list[tuple[dict[int, int], int, int]] = []

    def counted(*state: Any) -> Any:
        ran.update(["branches"])
        return branches(*state)

    def caught_up(rows: np.ndarray, *others: Any) -> Any:
        before = ran.total()
        result = passes(rows, *others)
        ran.clear()
        ran.update({"branches": before, "tokens": len(rows)})
        return result

    def draft(step: Any) -> Any:
        made = original(step)
        lengths = [len(runner.requests[req_id].prompt_token_ids) for req_id in runner.input_batch.req_ids]
        steps.append((dict(zip(lengths, map(len, made), strict=True)), ran["branches"], ran["tokens"]))
        ran.clear()
        return made

    monkeypatch.setattr(drafter, "draft", draft)
    counted.__dict__.update(start=branches.start, stop=branches.stop)
    monkeypatch.setattr(drafter.cut, "branches", counted)
    monkeypatch.setattr(drafter.passes, "branches", caught_up)
    requests, limits = prompts(5, longest=200)[::-1], [greedy(12)] * 3 + [greedy(40)] * 2
    resting = our_counter("resting_steps")
    outputs = generate(llm, requests, limits)
    assert outputs == generate(engine(), requests, limits)
    assert {len(made) for made, _, _ in steps} >= {5, 2}
    assert all(run == (len(made) <= CUT_OFF) for made, run, _ in steps)
    assert not any(any(made.values()) for made, _, _ in steps if len(made) > CUT_OFF)
    # After the crowd the two that are left catch up with all of the text that they have, and draft.
    first = next(i for i, (_, _, tokens) in enumerate(steps) if tokens)
    assert len(steps[first][0]) == 2 and any(steps[first][0].values())
    assert steps[first][2] > sum(steps[first][0])
    assert not any(tokens for _, _, tokens in steps[first + 1 :])
    assert our_counter("resting_steps") - resting == sum(run == 0 for _, run, _ in steps)

    steps.clear()
    # One begins as one that ended in the crowd; the other goes on from one that caught up.
    again = [requests[2], {"prompt_token_ids": requests[3]["prompt_token_ids"] + outputs[3]}]
    results = llm.generate(again, greedy(), use_tqdm=False)
    assert [result.num_cached_tokens for result in results] == [96, 96]
    assert [list(result.outputs[0].token_ids) for result in results] == generate(engine(), again, greedy())
    assert [tokens for _, _, tokens in steps if tokens] == [96 + 1]  # the newest of the prompt with them
    assert 2 in {drafts for made, _, _ in steps for drafts in made.values()}


@pytest.mark.engine
def test_heads_rest_while_drafts_do_not_pay(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are vLLM's own, and who comes once they pay drafts again."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    costs = drafter_of(llm).planner.adaptive.costs
    requests = prompts(6)
    expected = [generate(engine(), requests[i : i + 2], greedy(60)) for i in (0, 2, 4)]

    def generated(price: float) -> list[float]:
        """Generate in three batches; returns (steps that rested, drafts accepted)."""
        monkeypatch.setattr(costs, "relative", lambda size, doubt=0.0: 1 + price * np.arange(3))
        before = our_counter("resting_steps"), llm.counts["accepted"]
        assert [generate(llm, requests[i : i + 2], greedy(60)) for i in (0, 2, 4)] == expected
        return [our_counter("resting_steps") - before[0], llm.counts["accepted"] - before[1]]

    rested, accepted = generated(8.0)
    assert rested > 100 and accepted < 10
    monkeypatch.setattr(catch_up_budget, "MOST_AT_ONCE", 1e9)  # small steps save little for a trial
    drafter_of(llm).budget.seconds = 100.0
    rested, accepted = generated(0.01)
    assert rested < 60 and accepted > 20


@pytest.mark.engine
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", *[pytest.param(f, marks=pytest.mark.full) for f in ("mistral", "qwen2", "qwen3", "phi3")]],
)
def test_heads_that_caught_up_say_the_same(
    family: str, engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that they missed completed, in parts, they give the scores of heads that never rested."""
    options = {"method": "dynamo", "model": fitted_heads("dynamo", family), "eps_b": 0.0, "adaptive": True}
    llm = engine(options, family=family)
    drafter, runner = drafter_of(llm), runner_of(llm)
    adaptive, original = drafter.planner.adaptive, drafter.choose
    requests = prompts(3)
    monkeypatch.setattr(runner, "max_num_reqs", 8)
    monkeypatch.setattr(drafter.budget, "affordable", lambda missing, *_, **__: np.ones(len(missing), dtype=bool))

    def generated(rests: Callable[[int], bool]) -> tuple[list[list[int]], dict[Any, torch.Tensor]]:
        """Every request drafts all it can in a step, or nobody does and the heads rest."""
        steps, scores = iter(range(1000)), {}

        def choose_drafts(allowed: np.ndarray, *others: Any) -> np.ndarray:
            adaptive.resting = rests(next(steps))
            return np.zeros_like(allowed) if adaptive.resting else allowed

        def choose(rows: np.ndarray, found: list[torch.Tensor], first: torch.Tensor) -> Any:
            for place, row in enumerate(rows):
                request = runner.requests[runner.input_batch.req_ids[row]]
                said = len(request.prompt_token_ids), tuple(request.output_token_ids)
                scores[said] = torch.stack([one[place] for one in found])
            return original(rows, found, first)

        monkeypatch.setattr(adaptive, "choose", choose_drafts)
        monkeypatch.setattr(adaptive, "sleeps_on", lambda *_: False)
        monkeypatch.setattr(adaptive, "nap", lambda: 0)
        monkeypatch.setattr(drafter, "choose", choose)
        return generate(llm, requests, greedy(60)), scores

    resting = our_counter("resting_steps")
    expected, always = generated(lambda step: False)
    tokens, scores = generated(lambda step: step % 16 < 13)
    assert tokens == expected
    assert our_counter("resting_steps") - resting > 20
    common = always.keys() & scores.keys()
    assert len(common) > 10
    for place in common:
        torch.testing.assert_close(scores[place], always[place], rtol=1e-4, atol=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize("dear", [False, True])
def test_prompts_of_a_pause_are_caught_up_with_by_those_who_can_be_paid_for(
    dear: bool, engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads do not run over them; once drafts pay, the request that has missed least is first."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    drafter = drafter_of(llm)
    adaptive, original = drafter.planner.adaptive, drafter.passes.branches
    steps, caught_up = iter(range(1000)), []

    def choose(allowed: np.ndarray, *_: Any) -> np.ndarray:
        adaptive._steps = next(steps)
        adaptive.resting = adaptive._steps < 6
        return np.zeros_like(allowed) if adaptive.resting else allowed

    def branches(rows: np.ndarray, *others: Any) -> Any:
        caught_up.append(np.bincount(rows, minlength=2).tolist())
        return original(rows, *others)

    requests = prompts(2)
    monkeypatch.setattr(adaptive, "choose", choose)
    monkeypatch.setattr(adaptive, "sleeps_on", lambda *_: False)
    monkeypatch.setattr(adaptive, "nap", lambda: 0)
    monkeypatch.setattr(adaptive, "_pausing", False)
    monkeypatch.setattr(adaptive, "promised", np.inf)
    monkeypatch.setattr(adaptive, "resting", True)
    monkeypatch.setattr(adaptive, "_steps", 0)
    monkeypatch.setattr(adaptive.costs, "plain", lambda rows: 1.0)
    monkeypatch.setattr(drafter.budget, "seconds", 0.0)
    monkeypatch.setattr(drafter.budget, "_step", 0)
    monkeypatch.setattr(drafter.budget, "_prices", deque([0.025 if dear else 0.0], maxlen=9))
    monkeypatch.setattr(drafter.passes, "branches", branches)
    monkeypatch.setattr(drafter.budget, "spent", lambda *_: None)
    accepted = llm.counts["accepted"]
    assert generate(llm, requests, greedy(40)) == generate(engine(), requests, greedy(40))
    assert llm.counts["accepted"] > accepted
    if dear:  # a step puts 1/4 second aside, and a token takes 1/40
        assert [of_row > 0 for of_row in caught_up[0]] == [True, False] and caught_up[1][1] > 120
    else:
        assert len(caught_up) == 1 and min(caught_up[0]) > 60


@pytest.mark.engine
def test_requests_of_a_pause_that_promise_to_pay_catch_up(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled drafts did not pay; of greedy ones nothing is known yet."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    planner = drafter_of(llm).planner
    adaptive = AdaptiveDrafts(planner.config.num_speculative_tokens)
    drafting: list[bool] = []
    monkeypatch.setattr(adaptive.costs, "relative", lambda *_: np.array([1.0, 1.2, 1.3]))
    monkeypatch.setattr(adaptive.costs, "plain", lambda requests: 0.01)
    adaptive._pausing, adaptive.promised, adaptive.resting = True, None, True
    adaptive._last_drafted = adaptive._steps
    adaptive.acceptance._server_hits[0] = 0
    monkeypatch.setattr(adaptive, "_ends_at", lambda *_: 1 << 40)  # no trials
    stock = adaptive.choose
    monkeypatch.setattr(adaptive, "choose", lambda *args: drafting.append((found := stock(*args)).any()) or found)
    monkeypatch.setattr(planner, "adaptive", adaptive)
    monkeypatch.setattr(planner, "_learning", [adaptive])
    for name, value in {"seconds": 0.0, "_step": 0, "_prices": deque([1e-6], maxlen=9)}.items():
        monkeypatch.setattr(drafter_of(llm).budget, name, value)
    requests = prompts(1)
    generate(llm, requests, SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True))
    assert drafting and not any(drafting)
    assert generate(llm, requests, greedy(60)) == generate(engine(), requests, greedy(60))
    assert any(drafting)


@pytest.mark.engine
def test_heads_rest_over_prompts_and_who_drafts_goes_on(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes has its prompt caught up with once that is paid for, beside those who miss a step's tokens."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    drafter = drafter_of(llm)
    adaptive, budget, branches = drafter.planner.adaptive, drafter.budget, drafter.passes.branches
    rested: list[tuple[bool, bool]] = []
    caught_up: list[int] = []

    def drafted(step: Any) -> Any:
        rested.append((drafter.decoding, drafter.cut.resting))
        return draft(step)

    def passed(rows: np.ndarray, *others: Any) -> Any:
        caught_up.extend(count for count in np.bincount(rows).tolist() if count)
        return branches(rows, *others)

    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", drafted)
    monkeypatch.setattr(drafter.passes, "branches", passed)
    monkeypatch.setattr(adaptive, "choose", lambda allowed, *_: setattr(adaptive, "resting", False) or allowed)
    monkeypatch.setattr(adaptive, "sleeps_on", lambda *_: False)
    monkeypatch.setattr(adaptive, "nap", lambda: 0)
    monkeypatch.setattr(adaptive, "promised", 1.5)
    monkeypatch.setattr(adaptive.costs, "plain", lambda rows: 1.0)
    for name, value in {"seconds": 1.0, "_step": adaptive.steps, "_prices": deque([1e-6], maxlen=9)}.items():
        monkeypatch.setattr(budget, name, value)
    accepted = llm.counts["accepted"]
    assert CASES["arrivals_and_aborts"](llm) == CASES["arrivals_and_aborts"](engine())
    assert llm.counts["accepted"] > accepted
    assert {resting for decoding, resting in rested if decoding} == {False}
    assert {resting for decoding, resting in rested if not decoding} == {True}
    assert min(caught_up) <= 1 + drafter.config.num_speculative_tokens < max(caught_up)


@pytest.mark.engine
def test_sampling_requests_with_a_seed_wait_for_no_budget(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they draft depends on no clock, so that they repeat."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    drafter = drafter_of(llm)
    monkeypatch.setattr(drafter.budget, "affordable", lambda missing, *_: np.zeros(len(missing), dtype=bool))
    said = []
    for seed in (7, None):
        drafted = llm.counts["drafted"]
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=40, ignore_eos=True)
        said.append((generate(llm, prompts(2, 20), params), llm.counts["drafted"] - drafted))
    assert said[0][1] > 40 and said[1][1] == 0
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    assert generate(llm, prompts(2, 20), params) == said[0][0]


def test_budget_of_catching_up() -> None:
    budget = CatchUpBudget(step_tokens=4)
    missing = np.array([30, 0, 10, 500])
    assert budget.affordable(np.zeros(4, int), 100, 1.0, promised=None).all() and budget.seconds == 0
    # What it takes is not known: one does it.
    assert budget.affordable(missing, 101, 0.1, promised=None).tolist() == [False, True, True, False]
    budget.spent(np.array([10]), 0.1)
    budget.seconds = 0.0
    # 40 tokens are affordable after 4 * 4 steps' quarters of 0.1 seconds.
    assert [budget.affordable(missing, step, 0.1, promised=2.0).tolist() for step in (104, 116, 117)] == [
        [False, True, False, False], [False, True, True, False], [True, True, True, False],
    ]  # fmt: skip
    # Half of what drafts win, where that is less: 0.05 of the gain of 0.1 in each of 20 steps.
    budget.seconds = 0.0
    assert [budget.affordable(missing, step, 0.1, promised=1.1).tolist() for step in (136, 137)] == [
        [False, True, False, False], [False, True, True, False],
    ]  # fmt: skip
    budget.seconds = 0.0
    # In a pause it takes longer, and no trial is made by fewer than half.
    missing[2] = missing[0]
    assert budget.affordable(missing, 137 + 128, 0.1, promised=None).tolist() == [False, True, False, False]
    assert budget.affordable(missing, 137 + 7 * 128, 0.1, promised=None).tolist() == [True, True, False, False]
    assert budget.affordable(missing[[0, 2, 3]], 138 + 7 * 128, 0.1, promised=None).tolist() == [False] * 3
    # However long it has been, nobody waits for more than 4 steps.
    assert budget.affordable(missing, 10**6, 0.1, promised=None).tolist() == [True, True, False, False]
    assert budget.seconds == pytest.approx(0.4)
    # Who drafts and lacks a step's tokens is not held up, and they are not paid for.
    budget.seconds = 0.0
    few = np.array([4, 5])
    assert budget.affordable(few, 10**6, 0.1, promised=1.1).tolist() == [True, False]
    budget.seconds = 0.2
    budget.spent(np.array([3, 1]), 0.1)
    assert budget.seconds == 0.2
    # What drafts win while nobody lacks anything is kept for those who come.
    for steps, seconds in ((1000, 5.2), (2000, 0.1 * MOST_WON)):
        assert budget.affordable(np.zeros(2, int), 10**6 + steps, 0.1, promised=1.1).all()
        assert budget.seconds == pytest.approx(seconds)


def test_consecutive_tokens_are_spans_of_passes_that_are_not_too_large() -> None:
    rng = np.random.default_rng(0)
    for most_tokens, most_spans in ((100, 100), (7, 100), (100, 2), (5, 2), (1, 1)):
        lengths = rng.integers(1, 9, size=6)
        rows = np.repeat([4, 1, 0, 0, 2, 3], lengths)  # row 0 lacks tokens on both sides of others
        positions = np.concatenate(
            [start + np.arange(n) for start, n in zip((3, 0, 5, 40, 7, 9), lengths, strict=True)]
        )
        parts = list(consecutive(rows, positions, most_tokens, most_spans))
        assert [one for tokens, _ in parts for one in range(tokens.start, tokens.stop)] == list(range(len(rows)))
        for tokens, span in parts:
            assert span.num_tokens == tokens.stop - tokens.start <= most_tokens
            assert len(span.rows) <= most_spans
            assert np.repeat(span.rows, span.lengths).tolist() == rows[tokens].tolist()
            assert flat_ranges(span.starts, span.lengths).tolist() == positions[tokens].tolist()
    assert [len(span.rows) for _, span in consecutive(rows, positions, 100, 100)] == [6]
