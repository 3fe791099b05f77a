# SPDX-License-Identifier: Apache-2.0
"""Bypassed steps: which steps are, and that they are an engine's without speculation."""

from typing import Any

import pytest
from cases import CASES, generate, greedy, prompts
from conftest import Factory, drafter_of, runner_of
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS
from vllm_ppd.vllm_plugins.engine.v1.proposer import Bypass

ADAPTIVE = {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 3, "adaptive": True}


def scheduled(tokens: dict[str, int], new: tuple[Any, ...] = (), resumed: tuple[str, ...] = ()) -> SchedulerOutput:
    """A step of these tokens of each request."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = tokens, sum(tokens.values())
    output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids = list(new), set(resumed)
    return output


def test_so_many_steps_are_bypassed() -> None:
    bypass, step = Bypass(), scheduled({"b": 1, "a": 1})
    bypass.begin(2, ["a", "b"])
    active = []
    for _ in range(4):
        bypass.begin_step(step)
        active.append(bypass.active)
    assert active == [True, True, False, False]
    assert bypass.take_steps() == 2 and bypass.take_steps() == 0


@pytest.mark.parametrize(
    "other",
    [
        scheduled({"a": 1}),  # a request has ended, or was preempted
        scheduled({"a": 1, "c": 1}),
        scheduled({"a": 1, "b": 1}, new=("b",)),
        scheduled({"a": 1, "b": 1}, resumed=("b",)),
        scheduled({"a": 1, "b": 7}),  # a part of a prompt
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_other_requests_and_prompts_end_it(before: int, other: Any) -> None:
    bypass, step = Bypass(), scheduled({"a": 1, "b": 1})
    bypass.begin(5, ["a", "b"])
    for _ in range(before):
        bypass.begin_step(step)
    bypass.begin_step(other)
    assert not bypass.active and bypass.take_steps() == before
    bypass.begin_step(step)
    assert not bypass.active


def with_costs(llm: Any, share: float) -> DraftLengthController:
    """Have an adaptive engine choose by drafts that cost a share of a step each; returns its new controller."""
    planner = drafter_of(llm).planner
    most = planner.config.num_speculative_tokens
    table = CostTable(sizes=[1], counts=[0, most], seconds=[[1, 1 + most * share]])
    planner.controller = DraftLengthController(StepCosts(table))
    drafter_of(llm).bypass.take_steps()  # of requests of other tests
    return planner.controller


@pytest.mark.engine
@pytest.mark.parametrize("method", ["early", "dynamo"])
def test_bypassed_steps_are_those_of_an_engine_without_speculation(
    method: str, engine: Factory, fitted_heads: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that cost nine steps each never pay: most steps are bypassed, and counted all the same."""
    llm = engine(ADAPTIVE if method == "early" else {"method": method, "model": fitted_heads(method), "adaptive": True})
    drafter, runner = drafter_of(llm), runner_of(llm)
    requests, controller = prompts(3, 20), with_costs(llm, 9.0)
    expected = generate(engine(), requests, greedy(120))
    speculates, asked, forward, propose = [], [], runner._model_forward, runner.propose_draft_token_ids

    def told(*args: Any, **kwargs: Any) -> Any:
        speculates.append(runner.speculative_config is not None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", told)
    monkeypatch.setattr(runner, "propose_draft_token_ids", lambda *args: asked.append(1) or propose(*args))
    drafted, values = llm.counts["drafted"], drafter.counters.values.copy()
    for _ in range(2):
        assert generate(llm, requests, greedy(120)) == expected
    assert llm.counts["drafted"] - drafted < 60
    assert speculates.count(False) > 150
    assert len(asked) == speculates.count(True)  # vLLM asks for drafts by its runner's speculative_config alone
    # All are counted; the latest bypassed ones will be by the next step that is not.
    assert controller._steps + drafter.bypass.take_steps() == len(speculates)
    if method == "early":
        suppressed = (drafter.counters.values - values)[list(COUNTERS).index("suppressed_drafts")]
        assert suppressed > 2 * 3 * controller._steps


@pytest.mark.engine
def test_requests_that_come_and_go_in_bypassed_steps_say_the_same(engine: Factory, alone: Factory) -> None:
    expected, llm = alone("arrivals_and_aborts"), engine(ADAPTIVE)
    with_costs(llm, 9.0)
    assert CASES["arrivals_and_aborts"](llm) == expected
