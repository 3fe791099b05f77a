# SPDX-License-Identifier: Apache-2.0
"""After hundreds of steps without drafts their acceptance is what it was: no state of a
method goes stale.
"""

from typing import Any

import pytest
from cases import greedy, prompts
from conftest import DEMO, counting, full_but, scheduler_of, start_engine
from methods import ON_DEMO

LOOKUP: dict[str, Any] = {"prompt_lookup_min": 2}
METHODS = ON_DEMO | {
    "lookup": LOOKUP | {"method": "lookup"},
    "cp and lookup": ON_DEMO["cp"] | LOOKUP,
}
STEPS = 200
TOKENS = 290


@pytest.mark.engine
@pytest.mark.parametrize("name", full_but({"dynamo"}, METHODS))
def test_acceptance_is_what_it_was(name: str) -> None:
    llm = start_engine(
        DEMO,
        METHODS[name],
        max_num_seqs=2,
        max_model_len=640,
    )
    engine = llm.llm_engine
    scheduler = scheduler_of(llm)
    # Greedy text ends in a loop, which the heads do not know and lookups do.
    params = greedy(
        TOKENS,
        temperature=0.0 if "lookup" in name else 0.8,
        seed=1,
    )

    def accepted_late(drafting_early: bool) -> int:
        """Accepted drafts of a request's last tokens, those behind the first STEPS."""
        emitted = 0
        scheduler.max_requests = None if drafting_early else 0
        engine.add_request("request", prompts(1)[0], params)
        while emitted < STEPS:
            with counting(llm) as seen:
                for output in engine.step():
                    emitted = len(output.outputs[0].token_ids)
            assert drafting_early or not seen["accepted"]
        scheduler.max_requests = None
        with counting(llm) as seen:
            while engine.has_unfinished_requests():
                engine.step()
        return int(seen["accepted"])

    always, late = accepted_late(True), accepted_late(False)
    # A step may cross the border
    assert always > 10 and abs(always - late) <= 4
