# SPDX-License-Identifier: Apache-2.0
"""A request that is admitted with one token to compute does not end the uniform steps
of those that draft.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts, run_arrivals
from conftest import DEMO, counting, results_of, scheduler_of, start_engine
from methods import ON_DEMO

pytestmark = pytest.mark.engine
CACHED = {
    "prompt_token_ids": prompts(1)[0]["prompt_token_ids"][:65]
}  # 2 blocks, 1 token
ARRIVALS = {
    0: [(request, greedy(24)) for request in prompts(2)],
    8: [(CACHED, greedy(24))],
}
SETTINGS = {"enable_prefix_caching": True, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return run_arrivals(start_engine(DEMO, None, **SETTINGS), ARRIVALS)


@pytest.fixture(scope="module")
def drafting() -> Any:
    """An engine whose scheduler chooses the number of drafts, here always all or none."""
    options = {"num_speculative_tokens": 3, "adaptive": True}
    llm = start_engine(DEMO, ON_DEMO["cp"] | options, **SETTINGS)
    scheduler_of(llm).draft_policy = None
    generate(llm, [CACHED], greedy(4))
    return llm


@pytest.mark.parametrize(("limit", "tokens"), [(None, 4), (1, 1)])
def test_admitted_requests_get_as_many_tokens(
    drafting: Any,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    tokens: int,
) -> None:
    """All that they verify while others draft, and one while none does. The placeholder
    drafts of the first step change nothing.
    """
    scheduler = scheduler_of(drafting)
    monkeypatch.setattr(scheduler, "max_requests", limit)
    with counting(drafting) as seen, results_of(scheduler, "schedule") as steps:
        assert run_arrivals(drafting, ARRIVALS) == expected
    (admission,) = (
        output
        for output in steps
        if any(new.num_computed_tokens == 64 for new in output.scheduled_new_reqs)
    )
    assert list(admission.num_scheduled_tokens.values()) == [tokens] * 3
    assert (seen["accepted"] > 0) == (limit is None)
