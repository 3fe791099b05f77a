# SPDX-License-Identifier: Apache-2.0
"""A request that is admitted with one token to compute does not end the uniform steps
of those that draft.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import DEMO, counting, start_engine

pytestmark = pytest.mark.engine
CACHED = {
    "prompt_token_ids": prompts(1)[0]["prompt_token_ids"][:65]
}  # 2 blocks, 1 token
REQUESTS = [*prompts(2), CACHED]
SETTINGS = {"enable_prefix_caching": True, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(start_engine(DEMO, None, **SETTINGS), REQUESTS, greedy(24))


@pytest.fixture(scope="module")
def drafting() -> Any:
    """An engine whose scheduler chooses the number of drafts, here always all or none."""
    heads = str(DEMO.parent / "heads" / "cp")
    options = {"method": "cp", "model": heads, "num_speculative_tokens": 3}
    llm = start_engine(DEMO, options | {"adaptive": True}, **SETTINGS)
    scheduler_of(llm).draft_policy = None
    generate(llm, [CACHED], greedy(4))
    return llm


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize(("limit", "tokens"), [(None, 4), (1, 1)])
def test_admitted_requests_get_as_many_tokens(
    drafting: Any,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    tokens: int,
) -> None:
    """All that they verify while others draft, and one while none does. The placeholder
    drafts of the first step change nothing.
    """
    scheduler = scheduler_of(drafting)
    steps = []
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        steps.append(stock(*args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(scheduler, "max_requests", limit)
    monkeypatch.setattr(scheduler, "schedule", schedule)
    engine = drafting.llm_engine
    answers = {}
    with counting(drafting) as seen:
        for number, request in enumerate(REQUESTS):
            if request is CACHED:
                for _ in range(8):
                    engine.step()
            engine.add_request(str(number), request, greedy(24))
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
    (admission,) = (
        output
        for output in steps
        if any(new.num_computed_tokens == 64 for new in output.scheduled_new_reqs)
    )
    assert list(admission.num_scheduled_tokens.values()) == [tokens] * 3
    assert [answers[str(number)] for number in range(3)] == expected
    assert (seen["accepted"] > 0) == (limit is None)
