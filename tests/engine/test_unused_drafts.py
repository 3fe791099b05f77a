# SPDX-License-Identifier: Apache-2.0
"""A step whose drafts no request can use makes none, and launches what vLLM's own does:
prompts go on, or every request opted out or ends. Sampling parameters that have not
changed are not copied.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts, run_arrivals
from conftest import Factory, accepting, counting, runner_of
from methods import METHODS
from waits import Waits, watching

pytestmark = pytest.mark.engine
LOOKUP = {"prompt_lookup_min": 1}
ALONE = {"method": "lookup", **LOOKUP}
OUT = {"ppd_draft": False}
LONG = prompts(1, 215)  # three chunks


@pytest.mark.parametrize(
    "options", [METHODS["cp"], METHODS["cp"] | LOOKUP, ALONE]
)
def test_such_a_step_launches_what_vllms_does(
    engine: Factory, drafting: Factory, options: dict[str, Any]
) -> None:
    # When a request begins, vLLM clears its drafts, and a text that is searched is copied
    # to the device.
    first = 1

    def counts(llm: Any, **settings: Any) -> list[int]:
        generate(llm, LONG, greedy(**settings))
        with watching(runner_of(llm), "execute_model", "sample_tokens") as calls:
            generate(llm, LONG, greedy(**settings))
        return [call.operations.total() for call in calls[first:]]

    ours = drafting(options, async_scheduling=False)
    vllms = engine(on_v2=True, async_scheduling=False)
    with Waits() as copies:
        runner_of(vllms).sampler.apply_staged_writes()
    for settings in ({"max_tokens": 1}, {"max_tokens": 6, "extra_args": OUT}):
        expected = counts(vllms, **settings)
        for step in range(first, len(expected), 2):
            expected[step] -= (
                copies.operations.total()
            )  # ours copies with new requests alone
        assert counts(ours, **settings) == expected
    # The step that ends a prompt drafts.
    assert counts(ours, max_tokens=6)[5 - first] > expected[5 - first]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("options", [*METHODS.values(), ALONE])
def test_chunks_beside_decoding_requests(
    engine: Factory,
    drafting: Factory,
    options: dict[str, Any],
    asynchronous: bool,
) -> None:
    """Drafts are made where a request can use them, and the output is vLLM's, also with
    two batches in flight.
    """
    llm = drafting(options, async_scheduling=asynchronous)
    core = llm.llm_engine.engine_core.engine_core
    assert core.batch_queue_size == 1 + asynchronous
    short = prompts(3, 20)
    out = greedy(24, extra_args=OUT)
    arrivals = {
        0: [(LONG[0], greedy(24)), (short[0], out)],
        4: [(LONG[0], out), (short[1], greedy(99))],
        8: [(LONG[0], greedy(1))],
    }
    expected = run_arrivals(engine(), arrivals)
    with accepting(llm):
        assert run_arrivals(llm, arrivals) == expected
    generate(llm, short, out)  # ends a step that is in flight
    with counting(llm) as seen:
        generate(llm, LONG + short, out)
        generate(llm, LONG, greedy(1))
    assert seen["drafted"] == seen["drafting_seconds"] == 0


def test_matches_of_earlier_steps_are_not_told_again(drafting: Factory) -> None:
    llm = drafting(METHODS["cp"] | LOOKUP)
    repeated = [{"prompt_token_ids": [5, 17, 230] * 9}]
    for drafts in (True, False):
        with counting(llm) as seen:
            generate(llm, repeated, greedy(8, extra_args={"ppd_draft": drafts}))
        assert (seen["lookup_steps"] > 0) == drafts
