# SPDX-License-Identifier: Apache-2.0
"""Naps: steps of a pause that are vLLM's own in all they do, until other requests come or drafts are to be tried."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import drafter_of, runner_of
from exactness import CASES, generate, greedy, prompts

from vllm_ppd.vllm_plugins.adaptive.drafts import LONGEST_NAP
from vllm_ppd.vllm_plugins.adaptive.nap import Nap
from vllm_ppd.vllm_plugins.metrics import COUNTERS


def scheduled(tokens: dict[str, int], new: tuple[str, ...] = (), resumed: tuple[str, ...] = ()) -> Any:
    """As much of vLLM's SchedulerOutput as a nap looks at."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


def test_the_last_step_of_a_nap_is_looked_at() -> None:
    nap, step = Nap(), scheduled({"a": 1, "b": 1})
    nap.begin(3, {"a": 1, "b": 1})
    assert [(nap.begin_step(step), nap.asleep) for _ in range(3)] == [(0, True), (0, True), (0, False)]
    assert nap.end() == 3 and nap.end() == 0
    assert nap.begin_step(step) == 0 and not nap.asleep


@pytest.mark.parametrize(
    "other",
    [
        scheduled({"a": 1}),  # one has ended, or was preempted
        scheduled({"a": 1, "c": 1}),  # and another goes on in its place
        scheduled({"a": 1, "b": 1}, new=("b",)),  # of the same name
        scheduled({"a": 1, "b": 1}, resumed=("b",)),
        scheduled({"a": 1, "b": 7}),  # a part of a prompt
    ],
)
@pytest.mark.parametrize("slept", [0, 2])
def test_other_requests_and_prompts_end_it(slept: int, other: Any) -> None:
    nap = Nap()
    nap.begin(5, {"a": 1, "b": 1})
    for _ in range(slept):
        nap.begin_step(scheduled({"b": 1, "a": 1}))
    assert nap.begin_step(other) == slept
    assert not nap.asleep and nap.end() == 0


@pytest.mark.engine
@pytest.mark.parametrize("method", ["early", "dynamo"])
def test_steps_of_a_nap_are_those_of_an_engine_without_speculation(
    method: str, engine: Callable[..., Any], fitted_heads: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that cost a step each never pay: of a pause, most steps are slept through, and counted all the same."""
    early = {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 3, "adaptive": True}
    llm = engine(early if method == "early" else {"method": method, "model": fitted_heads(method), "adaptive": True})
    drafter, runner = drafter_of(llm), runner_of(llm)
    adaptive, forward = drafter.planner.adaptive, runner._model_forward
    costs, add = adaptive.costs, adaptive.costs.add
    monkeypatch.setattr(costs, "add", lambda size, drafts, _, steps=1: add(size, drafts, 1.0 + 9 * drafts, steps))
    requests = prompts(3, 20)
    expected = generate(engine(), requests, greedy(120))
    assert generate(llm, requests, greedy(120)) == expected
    speculates, asked, propose = [], [], runner.propose_draft_token_ids

    def told(*args: Any, **kwargs: Any) -> Any:
        speculates.append(runner.speculative_config is not None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", told)
    monkeypatch.setattr(runner, "propose_draft_token_ids", lambda *args: asked.append(1) or propose(*args))
    steps, drafted, values = adaptive.steps, llm.counts["drafted"], drafter.counters.values.copy()
    assert generate(llm, requests, greedy(120)) == expected
    assert llm.counts["drafted"] - drafted < 40
    assert speculates.count(False) > 60
    assert len(asked) == speculates.count(True)  # vLLM asks for drafts by its runner's speculative_config alone
    counted = adaptive.steps - steps
    assert counted >= len(speculates) - LONGEST_NAP  # all were counted, but for a nap that goes on
    withheld = (drafter.counters.values - values)[list(COUNTERS).index("withheld_drafts")]
    assert withheld > 2 * 3 * counted * (1 if method == "early" else 0)


@pytest.mark.engine
def test_requests_that_come_and_go_in_naps_say_the_same(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = CASES["arrivals_and_aborts"](engine())
    llm = engine({"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 3, "adaptive": True})
    adaptive, slept = drafter_of(llm).planner.adaptive, []
    original = adaptive.slept
    monkeypatch.setattr(adaptive, "nap", lambda: 5 if not adaptive.drafting else 0)
    monkeypatch.setattr(adaptive, "slept", lambda steps, now, own=1.0: slept.append(now) or original(steps, now, own))
    monkeypatch.setattr(adaptive, "choose", lambda allowed, *_: 0 * allowed)
    assert CASES["arrivals_and_aborts"](llm) == expected
    assert None in slept and any(slept)  # some were interrupted, some were not
