# SPDX-License-Identifier: Apache-2.0
"""What is counted and logged: of a request with vLLM's
--per-request-spec-decode-metrics, and of acceptance.
"""

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, our_log
from methods import METHODS

from vllm_ppd.vllm_plugins.draft_length import acceptance

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


def test_hardly_any_accepted_draft_is_a_warning(
    drafting: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting(METHODS["cp"])
    stock = drafter_of(llm).propose
    monkeypatch.setattr(
        drafter_of(llm),
        "propose",
        lambda *args, **kwargs: stock(*args, **kwargs).fill_(1),
    )
    monkeypatch.setattr(acceptance, "WINDOW", 20)
    with our_log() as messages:
        generate(llm, prompts(2), greedy(16, extra_args={"ppd_draft": False}))
        # Who opts out is given drafts all the same, which are rejected
        assert not messages
        generate(llm, prompts(2), greedy(16))
    assert len(messages) == 1 and "drafted tokens were accepted" in messages[0]
