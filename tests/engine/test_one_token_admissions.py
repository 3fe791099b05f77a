# SPDX-License-Identifier: Apache-2.0
"""A request that is admitted with one token to compute does not end the uniform steps
of those that draft.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import DEMO, counting, start_engine

pytestmark = pytest.mark.engine
HEADS = str(DEMO.parent / "heads" / "cp")
CACHED = prompts(1)[0]["prompt_token_ids"][:65]  # two blocks and a token


@pytest.fixture(scope="module")
def drafting() -> Any:
    """An engine whose scheduler chooses the number of drafts, here always all or none."""
    options = {
        "method": "cp",
        "model": HEADS,
        "adaptive": True,
        "num_speculative_tokens": 3,
    }
    llm = start_engine(DEMO, options, enable_prefix_caching=True, max_num_seqs=4)
    scheduler_of(llm).policy = None
    generate(llm, [{"prompt_token_ids": CACHED}], greedy(4))
    return llm


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("limit", [None, 1])
def test_admitted_requests_get_as_many_tokens(
    drafting: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """All that they verify while others draft, and one while none does."""
    scheduler = scheduler_of(drafting)
    steps = []
    monkeypatch.setattr(scheduler, "max_requests", limit)
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        steps.append(output)
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule)
    engine = drafting.llm_engine
    answers = {}
    with counting(drafting) as seen:
        for name in ("first", "second"):
            engine.add_request(name, prompts(3)[len(name) % 3], greedy(24))
        for _ in range(8):
            engine.step()
        engine.add_request("cached", {"prompt_token_ids": CACHED}, greedy(24))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
    (admission,) = [
        output
        for output in steps
        if any(new.num_computed_tokens == 64 for new in output.scheduled_new_reqs)
    ]
    expected = 4 if limit is None else 1
    assert set(admission.num_scheduled_tokens.values()) == {expected}
    assert len(admission.num_scheduled_tokens) == 3
    assert (seen["accepted"] > 0) == (limit is None)


def test_output_of_such_a_request(drafting: Any) -> None:
    """The placeholder drafts of its first step change nothing."""
    requests = [*prompts(2), {"prompt_token_ids": CACHED}]
    alone = start_engine(DEMO, None, enable_prefix_caching=True, max_num_seqs=4)
    expected = generate(alone, requests, greedy(24))
    assert generate(drafting, requests, greedy(24)) == expected
