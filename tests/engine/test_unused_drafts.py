# SPDX-License-Identifier: Apache-2.0
"""A step whose drafts no request can use makes none, and launches what vLLM's own does:
prompts go on, or every request opted out or ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cases import generate, greedy, prompts, run_arrivals
from conftest import Factory, counting, runner_of
from methods import METHODS
from replayed import launches_apart
from waits import Waits

pytestmark = pytest.mark.engine
LOOKUP = {"prompt_lookup_min": 1}
ALONE = {"method": "ppd", **LOOKUP}
OUT = {"ppd_draft": False}
LONG = prompts(1, 215)  # three chunks


@contextmanager
def launches(llm: Any) -> Iterator[list[int]]:
    """Operations and kernels of each step within that has tokens."""
    runner = runner_of(llm)
    counts: list[int] = []
    stock = runner.execute_model, runner.sample_tokens

    def counted(call: Any, *args: Any) -> Any:
        kernels: list[Any] = []
        with launches_apart(kernels.append), Waits() as operations:
            result = call(*args)
        counts[-1] += operations.operations + len(kernels)
        return result

    def execute_model(output: Any, *args: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return stock[0](output, *args)
        counts.append(0)
        return counted(stock[0], output, *args)

    def sample_tokens(*args: Any) -> Any:
        return counted(stock[1], *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", execute_model)
        patch.setattr(runner, "sample_tokens", sample_tokens)
        yield counts


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "options", [METHODS["cp"], METHODS["cp"] | LOOKUP, ALONE], ids=str
)
def test_such_a_step_launches_what_vllms_does(
    engine: Factory,
    drafting: Factory,
    options: dict[str, Any],
    asynchronous: bool,
) -> None:
    ours = drafting(options, async_scheduling=asynchronous)
    vllms = engine(on_v2=True, async_scheduling=asynchronous)
    for params in (greedy(1), greedy(6, extra_args=OUT)):
        counts = []
        for llm in (vllms, ours):
            generate(llm, LONG, params)
            with launches(llm) as steps:
                generate(llm, LONG, params)
            counts.append(steps)
        # A text that is searched is copied to the device when its request begins.
        first = int("prompt_lookup_min" in options)
        assert counts[0][first:] == counts[1][first:] and len(counts[0]) >= 3
    # The step that ends a prompt drafts.
    with launches(ours) as steps:
        generate(ours, LONG, greedy(6))
    assert steps[1] == counts[0][1] and steps[2] > counts[0][2]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "options", [*METHODS.values(), ALONE], ids=[*METHODS, "lookup"]
)
def test_chunks_beside_decoding_requests(
    engine: Factory,
    drafting: Factory,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    asynchronous: bool,
) -> None:
    """Drafts are made where a request can use them, and the output is vLLM's."""
    llm = drafting(options, async_scheduling=asynchronous)
    speculator = runner_of(llm).speculator
    stock = speculator.propose

    def propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert speculator.decodes(batch).any()
        return stock(batch, *args, **kwargs)

    monkeypatch.setattr(speculator, "propose", propose)
    short = prompts(3, 20)
    arrivals = {
        0: [(LONG[0], greedy(24)), (short[0], greedy(24, extra_args=OUT))],
        4: [(LONG[0], greedy(8, extra_args=OUT)), (short[1], greedy(30))],
        8: [(LONG[0], greedy(1))],
    }
    expected = run_arrivals(engine(), arrivals)
    with counting(llm) as seen:
        assert run_arrivals(llm, arrivals) == expected
    assert seen["accepted"] > 0
    with counting(llm) as seen:
        generate(llm, [*LONG, *short], greedy(6, extra_args=OUT))
        generate(llm, [*LONG, *short], greedy(1))
    assert seen["drafted"] == seen["drafting_seconds"] == 0


def test_matches_of_earlier_steps_are_not_told_again(
    drafting: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting(METHODS["cp"] | LOOKUP)
    repeated = [{"prompt_token_ids": [5, 17, 230] * 9}]
    with counting(llm) as seen:
        generate(llm, repeated, greedy(8))
    assert seen["lookup_steps"] > 0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_requests", 0)
    with counting(llm) as seen:
        generate(llm, repeated, greedy(8))
    assert not seen["lookup_steps"] and seen["drafting_off_steps/batch_size"] > 4
