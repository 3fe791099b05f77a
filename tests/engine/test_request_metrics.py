# SPDX-License-Identifier: Apache-2.0
"""What is counted of a request with vLLM's --per-request-spec-decode-metrics."""

import pytest
from cases import greedy, prompts
from conftest import Factory, counting
from methods import METHODS

pytestmark = pytest.mark.engine
REQUESTS = [{"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}, *prompts(2, 20)]
PARAMS = [greedy(24), greedy(24), greedy(24, extra_args={"ppd_draft": False})]


def test_a_request_sees_its_own_accepted_drafts(drafting: Factory) -> None:
    """Each sees what an engine counts that serves it alone, whoever decodes beside it."""
    options = METHODS["cp"] | {"prompt_lookup_min": 2}
    llm = drafting(options, per_request_spec_decode_metrics="detailed")

    def accepted(*places: int) -> list[int]:
        requests = [REQUESTS[i] for i in places]
        params = [PARAMS[i] for i in places]
        numbers = []
        for output in llm.generate(requests, params, use_tqdm=False):
            metrics = output.outputs[0].spec_decode_metrics.to_dict()
            numbers.append(metrics["num_accepted_draft_tokens"])
            assert sum(metrics.get("per_step_accepted", [])) == numbers[-1]
        return numbers

    alone = []
    for place in range(len(REQUESTS)):
        with counting(llm) as counts:
            alone += accepted(place)
        assert alone[-1] == counts["accepted"]
    assert alone == accepted(0, 1, 2)
    assert alone[0] > 5 and alone[2] == 0
