# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism: heads are sharded as the target is, the output is
that of vLLM alone.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from cases import CASES, VARIANTS, generate, greedy, prompts
from conftest import Factory, counting, engines, full_but
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


@pytest.fixture
def two_ranks(tiny_model: Factory) -> Iterator[Callable[..., Any]]:
    """two_ranks(options, cases, **settings): what an engine of two ranks says to each
    case, and its counts.
    """
    with engines(tiny_model) as get:

        def answers(
            options: dict[str, Any] | None, cases: Iterable[str], **settings: Any
        ) -> tuple[dict[str, Any], dict[str, float]]:
            llm = get(options, tensor_parallel_size=2, **settings)
            with counting(llm) as seen:
                said = {case: CASES[case](llm) for case in cases}
            return said, seen

        yield answers


# Each rank holds its part of the heads.
NAMES = [
    "heads",
    "classifiers",
    "cp",
    "cp-full",
    "cp-layers",
    "dynamo",
    "recurrent",
]


@pytest.mark.parametrize("name", full_but({"heads"}, NAMES))
def test_two_ranks(
    two_ranks: Factory, with_heads: Factory, alone: Factory, name: str
) -> None:
    cases = ("batch_16", "penalties", "structured_output", "arrivals_and_aborts")
    options = with_heads(VARIANTS[name])
    said, counts = two_ranks(options, cases)
    assert said == {case: alone(case) for case in cases}
    assert counts["accepted"] > 0
    assert (counts["deferred_steps"] > 0) == (options["method"] == "ppd")


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [{}, {"prompt_lookup_min": 1}, {"exit_layer": [3, 5]}],
    ids=["", "lookup", "exits"],
)
def test_two_ranks_adaptive(
    two_ranks: Factory, alone: Factory, given: dict[str, Any]
) -> None:
    """Two clocks, one choice: ranks that drafted differently would hang or say something else."""
    cases = ("batch_16", "more_than_fit", "arrivals_and_aborts")
    options = {
        "method": "ppd",
        "exit_layer": 5,
        "adaptive": True,
        "step_costs": "measure",
        **given,
    }
    # vLLM imports the extension in each rank
    said, counts = two_ranks(
        options, cases, worker_extension_cls="clocks.OtherClock"
    )
    assert said == {case: alone(case) for case in cases}
    assert counts["deferred_steps"] > 0


SAMPLED = [
    SamplingParams(temperature=0.8, seed=i, max_tokens=16, ignore_eos=True)
    for i in range(4)
]
# Variants, and how many numbers every rank holds of each: the low-rank experts
DIVIDED = {
    "cp-layers": 3 * 4 * 64,
    "cp": 0,
    "cp-full": 0,
    "recurrent": 0,
    "dynamo": 0,
}


@pytest.mark.parametrize("name", full_but({"cp-layers"}, DIVIDED))
def test_divided_heads(
    tiny_model: Factory, with_heads: Factory, engine: Factory, name: str
) -> None:
    """Ranks that divide the heads read half as much, and draft the same."""
    options = with_heads({**VARIANTS[name], "draft_vocab_size": 100})
    shared = DIVIDED[name]
    requests = prompts(4, 24)
    expected = generate(engine(), requests, greedy(16))
    held = []
    answers = []
    with engines(tiny_model) as get:
        for module in ("held", "divided"):
            llm = get(
                options,
                tensor_parallel_size=2,
                worker_extension_cls=f"{module}.Held",
            )
            held.append(llm.collective_rpc("numbers_held"))
            with counting(llm) as counts:
                assert generate(llm, requests, greedy(16)) == expected
            accepted = counts["accepted"]
            with counting(llm) as counts:
                sampled = generate(llm, requests, SAMPLED)
            assert accepted > 0
            answers.append([accepted, sampled, counts["accepted"]])
    assert answers[0] == answers[1]
    whole, divided = held
    assert divided == [shared + (numbers - shared) // 2 for numbers in whole]
