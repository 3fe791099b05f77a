# SPDX-License-Identifier: Apache-2.0
"""DynaMo's heads in engines: when they rest, and what they say once they have caught up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import drafter_of, our_counter, runner_of
from exactness import generate, greedy, prompts

from vllm_ppd.vllm_plugins.passes import consecutive
from vllm_ppd.vllm_plugins.states import flat_ranges

CUT_OFF = 2


@pytest.mark.engine
def test_heads_rest_in_batches_above_the_cut_off(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all decode; who was there does not draft afterwards, nor whoever goes on from it; tokens are vLLM's own."""
    options = {"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "disable_by_batch_size": CUT_OFF}
    llm = engine(options, enable_prefix_caching=True)
    drafter, runner = drafter_of(llm), runner_of(llm)
    original, branches = drafter.draft, drafter.cut.branches
    ran: Counter[str] = Counter()
    # ({length of the prompt: drafts made}, branches run, whether prompts were taken in)
    steps: list[tuple[dict[int, int], int, bool]] = []

    def counted(*state: Any) -> Any:
        ran.update(["branches"])
        return branches(*state)

    def draft(step: Any) -> Any:
        made = original(step)
        lengths = [len(runner.requests[req_id].prompt_token_ids) for req_id in runner.input_batch.req_ids]
        prompts = any(len(runner.requests[req_id].output_token_ids) <= 1 for req_id in runner.input_batch.req_ids)
        steps.append((dict(zip(lengths, map(len, made), strict=True)), ran.total(), prompts))
        ran.clear()
        return made

    monkeypatch.setattr(drafter, "draft", draft)
    monkeypatch.setattr(drafter.cut, "branches", counted)
    requests, limits = prompts(5), [greedy(12)] * 3 + [greedy(40)] * 2
    resting = our_counter("resting_steps")
    outputs = generate(llm, requests, limits)
    assert outputs == generate(engine(), requests, limits)
    # After the crowd two requests are left that have holes: nobody drafts, and the heads go on resting.
    together = [len(made) > CUT_OFF and not reading for made, _, reading in steps].index(True)
    assert {len(made) for made, _, _ in steps[together:]} >= {5, 2}
    assert not any(any(made.values()) or run for made, run, _ in steps[together:])
    assert any(len(made) > CUT_OFF and reading for made, _, reading in steps)
    assert all(run == reading for made, run, reading in steps if len(made) > CUT_OFF)
    assert our_counter("resting_steps") - resting == sum(run == 0 for _, run, _ in steps)

    steps.clear()
    # Both begin with a whole prompt of the crowd's; one goes on with what was decoded there.
    next_turn = {"prompt_token_ids": requests[3]["prompt_token_ids"] + outputs[3][:30]}
    again = [next_turn, requests[4]]
    results = llm.generate(again, greedy(), use_tqdm=False)
    assert [result.num_cached_tokens for result in results] == [128, 96]
    assert [list(result.outputs[0].token_ids) for result in results] == generate(engine(), again, greedy())
    assert {made.get(132, 0) for made, _, _ in steps} == {0}
    assert {made[123] for made, _, _ in steps if 123 in made} == {0, 1, 2}  # one draft, and none, at the request's end
    assert all(run == (123 in made) for made, run, _ in steps)


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
        monkeypatch.setattr(costs, "relative", lambda size: 1 + price * np.arange(3))
        before = our_counter("resting_steps"), llm.counts["accepted"]
        assert [generate(llm, requests[i : i + 2], greedy(60)) for i in (0, 2, 4)] == expected
        return [our_counter("resting_steps") - before[0], llm.counts["accepted"] - before[1]]

    rested, accepted = generated(8.0)
    assert rested > 100 and accepted < 10
    rested, accepted = generated(0.01)
    assert rested < 60 and accepted > 20


@pytest.mark.engine
def test_heads_that_caught_up_say_the_same(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that they missed completed, in parts, they give the scores of heads that never rested."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    drafter, runner = drafter_of(llm), runner_of(llm)
    adaptive, original = drafter.planner.adaptive, drafter.choose
    requests = prompts(3)
    monkeypatch.setattr(runner, "max_num_reqs", 8)

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
@pytest.mark.parametrize("lasts", [False, True])
def test_what_was_missed_in_a_pause_that_lasts_is_not_made_up_for_where_that_is_dear(
    lasts: bool, engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause that does not last the heads rest from its first step on, too, and catch up whatever it costs."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    drafter = drafter_of(llm)
    adaptive, original, caught_up = drafter.planner.adaptive, drafter.passes.branches, 0
    steps = iter(range(1000))

    def choose(allowed: np.ndarray, *_: Any) -> np.ndarray:
        adaptive.resting = next(steps) % 16 < 8
        adaptive.lasting = adaptive.resting and lasts
        return np.zeros_like(allowed) if adaptive.resting else allowed

    def branches(*missed: Any) -> Any:
        nonlocal caught_up
        caught_up += 1
        return original(*missed)

    monkeypatch.setattr(adaptive, "choose", choose)
    monkeypatch.setattr(adaptive, "sleeps_on", lambda *_: False)
    monkeypatch.setattr(drafter, "prices", [60.0, 60.0])  # seconds a token
    monkeypatch.setattr(drafter.passes, "branches", branches)
    resting, accepted = our_counter("resting_steps"), llm.counts["accepted"]
    assert generate(llm, prompts(2), greedy(60)) == generate(engine(), prompts(2), greedy(60))
    assert our_counter("resting_steps") - resting > 10
    if lasts:  # who was there once does not draft again, and the heads go on resting
        assert caught_up == 0 and our_counter("resting_steps") - resting > 40
    else:
        assert caught_up > 1 and llm.counts["accepted"] > accepted


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
