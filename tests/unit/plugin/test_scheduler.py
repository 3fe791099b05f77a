# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the policy of a step, and what it learns from its output."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable
from vllm_ppd.vllm_plugins.engine.scheduler import (
    GREEDY,
    LOOKED_UP,
    OPTED_OUT,
    STEP,
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
            adaptive=True, spec=SimpleNamespace(looks_up_alone=False)
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
        _watch=None,
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

    def choose(*args: Any) -> int:
        seen.append(args)
        return K

    monkeypatch.setattr(scheduler.policy, "choose", choose)
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
    scheduler.policy = None
    # A step in flight emits the last token but one
    scheduler.requests["greedy"].num_output_placeholders = 1
    assert (drafts(greedy=1), drafts(sampling=1)) == (0, K)


def test_verified_drafts_and_matches_are_learnt(scheduler: Any) -> None:
    names = ["greedy", "sampling", "out"]
    tokens = dict.fromkeys(names, 1 + K)
    made = chosen(scheduler, tokens, dict.fromkeys(names, K))
    output = SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[1, 2, 3, 4], [1], [1]],
    )
    before = [kind.trials[0] for kind in scheduler.policy.acceptance.kinds]
    scheduler._observe(
        getattr(made, STEP),
        0.5,
        made,
        output,
    )
    after = [kind.trials[0] for kind in scheduler.policy.acceptance.kinds]
    assert [a > b for a, b in zip(after, before, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    scheduler._follow_matches(names, [1, 0, 1])
    assert list(scheduler._kinds.values())[:3] == [
        GREEDY + LOOKED_UP,
        0,
        OPTED_OUT,
    ]
