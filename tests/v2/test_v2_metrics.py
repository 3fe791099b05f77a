# SPDX-License-Identifier: Apache-2.0
"""Runner V2 counts and logs what V1 does: steps, invalid drafts, time, and acceptance near zero."""

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, our_log, runner_of
from small import METHODS
from test_request_metrics import DETAILED, check_what_requests_see
from test_request_metrics import METHODS as WITH_LOOKUPS

from vllm_ppd.vllm_plugins.drafting import acceptance_watch
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS

pytestmark = pytest.mark.engine


def test_steps_and_time_are_counted(v2_engine: Factory) -> None:
    llm = v2_engine({**METHODS["early"], "gamma": 0.5})
    with counting(llm) as seen:
        generate(llm, prompts(2), greedy(12))
    # Nothing stops at gamma: what lies behind it is verified as well.
    assert set(seen) & set(COUNTERS) == {"deferred_steps", "fallback_steps", "drafting_seconds"}
    assert seen["deferred_steps"] > seen["fallback_steps"] > 0 and seen["drafting_seconds"] > 0


def test_invalid_drafts_are_counted_and_logged_once(v2_engine: Factory) -> None:
    """Heads with a NaN: nothing of theirs is accepted, the output is the target's, and the log says why."""
    llm, expected = v2_engine(METHODS["cp"]), generate(v2_engine(), prompts(2), greedy(12))
    weights = runner_of(llm).speculator.host.drafter.gate
    sound = weights.clone()
    weights.fill_(float("nan"))
    try:
        with our_log() as messages:
            for _ in range(2):
                with counting(llm) as seen:
                    assert generate(llm, prompts(2), greedy(12)) == expected
                assert 10 < seen["invalid_drafts"] <= 24 and not seen["accepted"]
    finally:
        weights.copy_(sound)
    assert len([message for message in messages if "NaN or infinite logits" in message]) == 1


def test_hardly_any_accepted_draft_is_a_warning(v2_engine: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = v2_engine(METHODS["cp"])
    stock = runner_of(llm).speculator.propose
    monkeypatch.setattr(runner_of(llm).speculator, "propose", lambda *args, **kwargs: stock(*args, **kwargs).fill_(1))
    monkeypatch.setattr(acceptance_watch, "WINDOW", 20)
    with our_log() as messages:
        generate(llm, prompts(2), greedy(16, extra_args={"ppd_draft": False}))
        assert not messages  # who opts out is given drafts all the same, which are rejected
        generate(llm, prompts(2), greedy(16))
    assert len(messages) == 1 and "drafted tokens were accepted" in messages[0]


@pytest.mark.parametrize("name", WITH_LOOKUPS)
def test_a_request_sees_its_own_accepted_drafts(v2_engine: Factory, name: str) -> None:
    check_what_requests_see(v2_engine(WITH_LOOKUPS[name], asynchronous=True, **DETAILED))
