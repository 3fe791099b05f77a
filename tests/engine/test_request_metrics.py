# SPDX-License-Identifier: Apache-2.0
"""What is counted and logged: of a request with vLLM's
--per-request-spec-decode-metrics, of steps, of acceptance.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, our_log
from methods import METHODS

from vllm_ppd.vllm_plugins.draft_length import watch
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS

pytestmark = pytest.mark.engine

LOOKUP = {"method": "ppd", "prompt_lookup_min": 2}
REQUESTS = [{"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}, *prompts(2, 20)]
PARAMS = [greedy(24), greedy(24), greedy(24, extra_args={"ppd_draft": False})]


@pytest.mark.parametrize(
    "options",
    [LOOKUP, METHODS["cp"] | LOOKUP | {"method": "cp"}],
    ids=["alone", "beside heads"],
)
def test_a_request_sees_its_own_accepted_drafts(
    drafting: Factory, options: dict[str, Any]
) -> None:
    """Each sees what an engine counts that serves it alone, whoever decodes beside it."""
    llm = drafting(options, per_request_spec_decode_metrics="detailed")

    def accepted(*places: int) -> list[int]:
        outputs = llm.generate(
            [REQUESTS[i] for i in places], [PARAMS[i] for i in places], use_tqdm=False
        )
        seen = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
        for of_request in seen:
            assert (
                sum(of_request.get("per_step_accepted", []))
                == of_request["num_accepted_draft_tokens"]
            )
        return [of_request["num_accepted_draft_tokens"] for of_request in seen]

    alone = []
    for place in range(len(REQUESTS)):
        with counting(llm) as counts:
            alone += accepted(place)
        assert alone[-1] == counts["accepted"]
    assert alone == accepted(0, 1, 2)
    assert alone[0] > 5 and alone[2] == 0


def test_steps_and_time_are_counted(drafting: Factory) -> None:
    llm = drafting({**METHODS["early"], "gamma": 0.5})
    with counting(llm) as seen:
        generate(llm, prompts(2), greedy(12))
    # Nothing stops at gamma: what lies behind it is verified as well.
    assert set(seen) & set(COUNTERS) == {
        "deferred_steps",
        "fallback_steps",
        "drafting_seconds",
    }
    assert (
        seen["deferred_steps"] > seen["fallback_steps"] > 0
        and seen["drafting_seconds"] > 0
    )


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
    monkeypatch.setattr(watch, "WINDOW", 20)
    with our_log() as messages:
        generate(llm, prompts(2), greedy(16, extra_args={"ppd_draft": False}))
        # Who opts out is given drafts all the same, which are rejected
        assert not messages
        generate(llm, prompts(2), greedy(16))
    assert len(messages) == 1 and "drafted tokens were accepted" in messages[0]
