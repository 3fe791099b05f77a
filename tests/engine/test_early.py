# SPDX-License-Identifier: Apache-2.0
"""Early drafting: which steps take saved states, and what they save."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import (
    Factory,
    counting,
    drafter_of,
    full_but,
    results_of,
    runner_of,
    scheduler_of,
)
from methods import METHODS
from replayed import Replayed, call_attention_directly

from vllm_ppd.vllm_plugins.draft_length.costs import (
    NO_DRAFTS,
    Plan,
    plans_of,
)
from vllm_ppd.vllm_plugins.draft_length.policy import Step
from vllm_ppd.vllm_plugins.engine.dummy_steps import STEPS, time_steps
from vllm_ppd.vllm_plugins.methods.early.speculator import GraphsByExit

pytestmark = pytest.mark.engine
EARLY = METHODS["early"]
EXITS = {
    "method": "early",
    "exit_layer": [3, 5],
    "adaptive": "table",
}


def test_drafts_end_at_the_length_that_fits(engine: Factory) -> None:
    """vLLM reduces an automatic --max-model-len to what the KV cache holds, after the
    model has loaded.
    """
    runner = runner_of(
        engine(EARLY, max_model_len=-1, kv_cache_memory_bytes=1 << 20)
    )
    longest = runner.model_config.hf_config.max_position_embeddings
    assert (
        runner.speculator.passes.max_model_len == runner.max_model_len < longest
    )


def test_shallow_work_is_not_done_twice(
    engine: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding runs the last stack alone over the tokens that shallow passes have seen."""
    llm = engine(EARLY)
    speculator = drafter_of(llm)
    first = speculator.cut.stacks[0]
    tokens = []
    stock = type(first).__call__

    def call(self: Any, input_ids: Any, positions: Any, *rest: Any) -> Any:
        if self is first:
            tokens.append(len(positions))
        return stock(
            self,
            input_ids,
            positions,
            *rest,
        )

    monkeypatch.setattr(type(first), "__call__", call)
    request = prompts(1, 20)
    steps = results_of(
        speculator, "begin_step", lambda _: speculator.deferred.deep
    )
    with counting(llm) as seen, steps as is_deep:
        generate(llm, request, greedy(16))
    deep = sum(is_deep)
    assert is_deep == [False] + [True] * deep and deep >= 4
    assert seen["fallback_steps"] == 1 and seen["drafting_seconds"] > 0
    # The last step's counters may travel with a step to come.
    assert deep - 1 <= seen["deferred_steps"] <= deep
    cycles = 1 + deep  # each ends in K + 1 shallow passes of one token
    width = speculator.deferred.width
    assert tokens == [len(request[0]["prompt_token_ids"])] + [1] * (
        cycles * width
    )


def test_drafts_below_gamma_are_verified_as_well(engine: Factory) -> None:
    """vLLM schedules them with the batch's others, and what is right among them costs nothing."""
    requests = prompts(2, 40)
    expected = generate(engine(), requests, greedy(16))
    accepted = []
    for options in (EARLY, EARLY | {"gamma": 0.999}):
        llm = engine(options)
        with counting(llm) as seen:
            assert generate(llm, requests, greedy(16)) == expected
        accepted.append(seen["accepted"])
    assert accepted[0] == accepted[1] > 0


@pytest.mark.parametrize("asynchronous", full_but({True}, (False, True)))
def test_the_exit_may_change_with_each_step(
    engine: Factory, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """KV is completed behind the exit of the step before, and drafts of each exit are
    accepted.
    """
    llm = engine(EXITS, async_scheduling=asynchronous)
    speculator = drafter_of(llm)
    policy = scheduler_of(llm).draft_policy
    rng = random.Random(0)
    plans = [NO_DRAFTS, *2 * plans_of([0, 1, 3], 2)]
    accepted = Counter[Plan]()
    learn = policy.observe

    def way(_: None) -> tuple[bool, int, int]:
        deferred = speculator.deferred
        return deferred.deep, deferred.exit, speculator.cut.exit

    def observe(
        step: Step,
        seconds: float | None,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        emitted: Sequence[int],
    ) -> None:
        learn(step, seconds, req_ids, kinds, emitted)
        if step.verified is not None:
            accepted[step.verified] += sum(emitted) - len(emitted)

    monkeypatch.setattr(policy, "holds", lambda *_: False)

    def choose(
        requests: int, ahead: int, req_ids: Sequence[str], *_: Any
    ) -> None:
        policy.latest = rng.choice(plans) if req_ids else NO_DRAFTS

    monkeypatch.setattr(policy, "choose", choose)
    monkeypatch.setattr(policy, "observe", observe)
    requests = prompts(12, 110)
    params = [greedy(max_tokens=10 + 7 * i) for i in range(12)]
    expected = generate(engine(), requests, params)
    with results_of(speculator, "begin_step", way) as seen:
        assert generate(llm, requests, params) == expected
    changes = {(before, now) for deep, before, now in seen if deep}
    assert changes == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert accepted[Plan(3, 0)] > 0 and accepted[Plan(3, 1)] > 0


def test_each_exit_is_timed(engine: Factory) -> None:
    llm = engine(EXITS)
    assert scheduler_of(llm).draft_policy.plans == plans_of([0, 1, 3], 2)
    speculator = drafter_of(llm)
    with results_of(
        speculator, "propose", lambda _: speculator.cut.exit
    ) as exits:
        seconds = time_steps(runner_of(llm), 2, plans_of([0, 3], 2))
    assert len(seconds) == 3 and min(seconds) > 0
    # After the prompts
    assert exits[1:] == [1] * STEPS + [0] * STEPS


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="engines there have real graphs"
)
def test_each_exit_has_graphs(
    engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(EXITS)
    speculator = drafter_of(llm)
    policy = scheduler_of(llm).draft_policy
    call_attention_directly(runner_of(llm).model)
    graphs = Replayed(speculator)
    graphs.graphs = GraphsByExit(lambda: speculator.cut.exit)
    for exit in (0, 1):
        speculator.read_at(exit)
        graphs.capture()
    monkeypatch.setattr(policy, "holds", lambda *_: False)
    requests = prompts(3)
    params = [greedy(max_tokens=n) for n in (6, 12, 20)]
    expected = generate(engine(), requests, params)
    accepted = []
    for used in (None, graphs):
        plans = itertools.cycle([Plan(3), Plan(3), Plan(3, 1), Plan(3, 1)])

        def choose(*_: Any, plans: Iterator[Plan] = plans) -> None:
            policy.latest = next(plans)

        monkeypatch.setattr(policy, "choose", choose)
        monkeypatch.setattr(speculator, "graphs", used)
        with counting(llm) as seen:
            assert generate(llm, requests, params) == expected
        accepted.append(seen["accepted"])
    assert accepted[0] == accepted[1] > 0
    assert len(graphs.graphs) == 6 and graphs.replays > 4
