# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism: heads are sharded as the target is, the output is
that of vLLM alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import CASES, VARIANTS, generate, greedy, prompts
from conftest import Factory, accepting, counting, engines, full_but
from held import Held
from learned import learn_from_few
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


@pytest.fixture
def two_ranks(tiny_model: Factory) -> Iterator[Callable[..., Any]]:
    """two_ranks(options, **settings): an engine of two ranks."""
    with engines(tiny_model) as get:
        yield functools.partial(get, tensor_parallel_size=2)


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
    options = with_heads(VARIANTS[name])
    llm = two_ranks(options)
    with accepting(llm) as seen:
        for case in ("penalties", "structured_output", "arrivals_and_aborts"):
            assert CASES[case](llm) == alone(case)
    assert (seen["deferred_steps"] > 0) == (options["method"] == "early")


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
    options = {
        "method": "early",
        "exit_layer": 5,
        "adaptive": True,
        "step_costs": "measure",
        **given,
    }
    # vLLM imports the extension in each rank
    llm = two_ranks(options, worker_extension_cls="clocks.OtherClock")
    with counting(llm) as seen:
        for case in ("batch_16", "more_than_fit", "arrivals_and_aborts"):
            assert CASES[case](llm) == alone(case)
    assert seen["deferred_steps"] > 0


def test_two_ranks_learn(
    two_ranks: Factory, engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both draft by the first one's solution, from the same step on."""
    learn_from_few(monkeypatch)
    requests = prompts(12, 60)
    expected = generate(engine(), requests, greedy(120))
    llm = two_ranks(
        {"method": "ppd"}, worker_extension_cls="few_positions.FewPositions"
    )
    with accepting(llm) as seen:
        for _ in range(2):
            assert generate(llm, requests, greedy(120)) == expected
    assert seen["learned_solutions"] > 0


SAMPLED = [
    SamplingParams(
        temperature=0.8,
        seed=i,
        max_tokens=16,
        ignore_eos=True,
    )
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
    two_ranks: Factory, with_heads: Factory, engine: Factory, name: str
) -> None:
    """Ranks that divide the heads read half of what one rank does, and draft the same."""
    options = with_heads({**VARIANTS[name], "draft_vocab_size": 100})
    shared = DIVIDED[name]
    requests = prompts(4, 24)
    expected = generate(engine(), requests, greedy(16))
    before = Held().numbers_held()
    held = []
    answers = []
    for start, module in ((engine, "held"), (two_ranks, "divided")):
        llm = start(options, worker_extension_cls=f"{module}.Held")
        held.append(llm.collective_rpc("numbers_held"))
        with accepting(llm) as greedily:
            assert generate(llm, requests, greedy(16)) == expected
        with counting(llm) as seen:
            sampled = generate(llm, requests, SAMPLED)
        answers.append([greedily["accepted"], sampled, seen["accepted"]])
    assert answers[0] == answers[1]
    (whole,), divided = held
    assert divided == [shared + (whole - before - shared) // 2] * 2
