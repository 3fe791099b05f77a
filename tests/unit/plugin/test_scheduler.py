# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the policy of a step, and what it learns from its output."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, Plan
from vllm_ppd.vllm_plugins.draft_length.policy import STEP
from vllm_ppd.vllm_plugins.engine.scheduler import (
    GREEDY,
    LOOKED_UP,
    OPTED_OUT,
    DraftingScheduler,
)

K = 3


@pytest.fixture
def scheduler() -> Any:
    """Of three requests that decode, one of which opted out, and one with a prompt."""
    made: Any = object.__new__(DraftingScheduler)
    names = ("greedy", "sampling", "out", "prompt")
    vars(made).update(
        config=SimpleNamespace(
            adaptive=True,
            num_exits=1,
            spec=SimpleNamespace(looks_up_alone=False),
        ),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        requests={
            name: SimpleNamespace(
                num_tokens=5000 if name == "prompt" else 20,
                num_computed_tokens=0 if name == "prompt" else 19,
                num_output_placeholders=0,
                num_output_tokens=0,
                max_tokens=2,
            )
            for name in names
        },
        _kinds=dict(zip(names, (GREEDY, 0, OPTED_OUT, 0), strict=True)),
        _limits={"sampling": 1},
        _may_draft=True,
        _pending=defaultdict(float),
        _matched=False,
        _matches=([], []),
        _watch=None,
        exit=0,
        log_stats=False,
        max_num_scheduled_tokens=2048,
        max_requests=None,
        num_spec_tokens=K,
        waiting=[],
    )
    made.follow(CostTable(sizes=[1], counts=[0, K], seconds=[[1.0, 1.1]]))
    return made


def chosen(scheduler: Any, tokens: dict[str, int], drafts: dict[str, int]) -> Any:
    """The output of a step with scheduled tokens and verified drafts."""
    output = SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={
            name: [-1] * count for name, count in drafts.items()
        },
        num_spec_tokens_to_schedule=K,
    )
    scheduler._choose(output)
    return output


def test_steps_are_described(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def choose(*args: Any) -> Plan:
        seen.append(args)
        return Plan(K)

    monkeypatch.setattr(scheduler.draft_policy, "choose", choose)
    decoding = dict.fromkeys(("greedy", "sampling", "out"), 1 + K)
    step = getattr(chosen(scheduler, decoding, dict.fromkeys(decoding, K)), STEP)
    assert step.steady() and step.requests == 3
    assert seen[-1] == (3, 0, ["greedy", "sampling"], [GREEDY, 0])
    # Half of the prompt, and a request that has just become able to decode
    tokens = {"greedy": 1 + K, "sampling": 1, "prompt": 2000}
    step = getattr(chosen(scheduler, tokens, {"greedy": K}), STEP)
    assert (step.verified, step.prompt_tokens) == (None, 2000)
    assert seen[-1][:2] == (2, 2048)


def test_drafts_that_nobody_can_use_are_not_made(scheduler: Any) -> None:
    """Of requests that opted out, a prompt that goes on, and the last tokens."""

    def drafts(**tokens: int) -> Any:
        return chosen(scheduler, tokens, {}).num_spec_tokens_to_schedule

    assert drafts(out=1, prompt=50) == 0
    assert drafts(out=1, prompt=50, greedy=1) == K
    scheduler.draft_policy = None
    # A step in flight emits the last token but one
    scheduler.requests["greedy"].num_output_placeholders = 1
    assert (drafts(greedy=1), drafts(sampling=1)) == (0, K)


def test_verified_drafts_and_matches_are_learnt(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["greedy", "sampling", "out"]
    tokens = dict.fromkeys(names, 1 + K)
    made = chosen(scheduler, tokens, dict.fromkeys(names, K))
    output = SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[1, 2, 3, 4], [1], [1]],
    )
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        scheduler.draft_policy, "observe", lambda *args: seen.append(args)
    )
    step = getattr(made, STEP)
    scheduler._matches = names, [1, 0, 1]
    scheduler._observe(step, 0.5, made, output)
    kinds = [GREEDY + LOOKED_UP, 0]
    assert seen == [(step, 0.5, ["greedy", "sampling"], kinds, [4, 1])]
    assert scheduler._kinds["out"] == OPTED_OUT
