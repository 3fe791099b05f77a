# SPDX-License-Identifier: Apache-2.0
"""What a request sees of its own drafts, with vLLM's --per-request-spec-decode-metrics."""

from typing import Any

import pytest
from cases import greedy, prompts
from conftest import DEMO, counting, start_engine

pytestmark = pytest.mark.engine

DETAILED = {"per_request_spec_decode_metrics": "detailed"}
HEADS = {"method": "cp", "model": str(DEMO.parent / "heads" / "cp")}
METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"method": "lookup", "prompt_lookup_min": 2},
    "heads and lookup": {**HEADS, "prompt_lookup_min": 2},
}
REQUESTS = [{"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}, *prompts(2, 20)]
PARAMS = [greedy(24), greedy(24), greedy(24, extra_args={"ppd_draft": False})]


def check_what_requests_see(llm: Any) -> None:
    """Each sees what an engine counts that serves it alone, whoever decodes beside it."""

    def accepted(*places: int) -> list[int]:
        outputs = llm.generate([REQUESTS[i] for i in places], [PARAMS[i] for i in places], use_tqdm=False)
        seen = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
        for of_request in seen:
            assert sum(of_request.get("per_step_accepted", [])) == of_request["num_accepted_draft_tokens"]
        return [of_request["num_accepted_draft_tokens"] for of_request in seen]

    alone = []
    for place in range(len(REQUESTS)):
        with counting(llm) as counts:
            alone += accepted(place)
        assert alone[-1] == counts["accepted"]
    assert alone == accepted(0, 1, 2)
    assert alone[0] > 5 and alone[2] == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_request_sees_its_own_accepted_drafts(name: str) -> None:
    check_what_requests_see(start_engine(DEMO, METHODS[name], **DETAILED))
