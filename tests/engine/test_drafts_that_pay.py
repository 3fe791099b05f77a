# SPDX-License-Identifier: Apache-2.0
"""The number of drafts: vLLM's scheduler takes none where drafts do not pay."""

from collections import defaultdict
from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, accepting, counting, full_but, scheduler_of
from methods import METHODS, WITH_RECURRENT

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable
from vllm_ppd.vllm_plugins.engine import dummy_steps

pytestmark = pytest.mark.engine


def follow(llm: Any, share: float) -> None:
    """Have an engine choose anew by a table whose drafts cost a share of a step."""
    scheduler = scheduler_of(llm)
    counts = [0, scheduler.num_spec_tokens]
    seconds = [[1.0, 1 + share]] * 2
    scheduler.follow(CostTable(sizes=[1, 4], counts=counts, seconds=seconds))


@pytest.fixture
def adaptive(drafting: Factory, monkeypatch: pytest.MonkeyPatch) -> Factory:
    """adaptive(options, asynchronous): an engine that chooses, its costs measured in few steps."""
    monkeypatch.setattr(dummy_steps, "TIMED", 1)

    def get(options: dict[str, Any], asynchronous: bool = True) -> Any:
        return drafting(
            {
                **options,
                "adaptive": "table",
                "step_costs": "measure",
            },
            async_scheduling=asynchronous,
        )

    return get


@pytest.mark.parametrize("asynchronous", full_but({True}, (False, True)))
@pytest.mark.parametrize("name", full_but({"cp", "early"}, METHODS))
def test_drafts_that_never_pay_are_not_made(
    engine: Factory, adaptive: Factory, name: str, asynchronous: bool
) -> None:
    """The output is vLLM's, and drafts come back where they begin to pay."""
    llm = adaptive(METHODS[name], asynchronous)
    requests = prompts(2)
    expected = generate(engine(), requests, greedy(64))
    follow(llm, 100.0)
    with counting(llm) as seen:
        assert generate(llm, requests, greedy(64)) == expected
    assert seen["drafts"] <= 16 and seen["drafting_off_steps/cost"] > 50
    assert seen["suppressed_drafts"] > 50 * scheduler_of(llm).num_spec_tokens
    follow(llm, 0.001)
    with accepting(llm) as seen:
        assert generate(llm, requests, greedy(64)) == expected
    assert not seen["drafting_off_steps/cost"]


@pytest.mark.parametrize("name", METHODS)
def test_hard_cut_off(engine: Factory, drafting: Factory, name: str) -> None:
    """In a batch of more requests nobody drafts; vLLM's scheduler keeps to it."""
    llm = drafting({**METHODS[name], "disable_by_batch_size": 2})
    crowd = prompts(3, 20)
    # The last one drafts once it is left alone
    for lengths in ((8, 8, 8), (4, 4, 24)):
        params = [greedy(length) for length in lengths]
        with counting(llm) as seen:
            assert generate(llm, crowd, params) == generate(
                engine(), crowd, params
            )
        assert (seen["drafted"] > 0) == (max(lengths) == 24)


MIXED = WITH_RECURRENT | {"lookup": {"method": "lookup", "prompt_lookup_min": 1}}


@pytest.mark.parametrize("name", full_but({"cp", "lookup"}, MIXED))
def test_own_numbers_of_drafts(
    engine: Factory,
    drafting: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Requests of one batch ask for 0, 1, 2, ... drafts a step, and none accepts more."""
    llm = drafting(MIXED[name])
    scheduler = scheduler_of(llm)
    most = scheduler.num_spec_tokens
    requests = prompts(12)
    own = [number % (1 + most) for number in range(len(requests))]
    accepted: dict[int, list[int]] = defaultdict(list)
    stock = scheduler.update_from_output

    def update_from_output(step: Any, output: Any) -> Any:
        for req_id in step.scheduled_spec_decode_tokens:
            request = scheduler.requests.get(req_id)  # None once it has ended
            sampled = output.sampled_token_ids[output.req_id_to_index[req_id]]
            if request is not None and sampled:
                bound = request.sampling_params.extra_args["ppd_num_drafts"]
                accepted[bound].append(len(sampled) - 1)
        return stock(step, output)

    monkeypatch.setattr(
        scheduler,
        "update_from_output",
        update_from_output,
    )
    params = [greedy(extra_args={"ppd_num_drafts": n}) for n in own]
    expected = generate(engine(), requests, greedy())
    assert generate(llm, requests, params) == expected
    assert all(max(accepted[n]) <= n for n in range(1 + most))
    assert all(sum(accepted[n]) > 0 for n in range(1, 1 + most))
