# SPDX-License-Identifier: Apache-2.0
"""Early drafting: which steps take saved states, and what they save."""

from collections import Counter
from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, runner_of
from methods import METHODS

pytestmark = pytest.mark.engine
EARLY = METHODS["early"]


@pytest.fixture
def modes(engine: Factory, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps of the early engine by the way that they go."""
    speculator = drafter_of(engine(EARLY))
    seen = Counter[str]()
    stock = speculator.begin_step

    def begin_step(batch: Any) -> None:
        stock(batch)
        seen[speculator.deferred.mode] += 1

    monkeypatch.setattr(speculator, "begin_step", begin_step)
    return seen


def test_a_prompt_that_joins_leaves_the_others_their_states(
    engine: Factory, modes: Counter[str]
) -> None:
    """The first stack runs over the prompt's tokens, the last one over all."""
    requests = prompts(6, 110)
    params = [greedy(max_tokens=n) for n in (4, 16, 6, 16, 8, 8)]
    expected = generate(engine(), requests, params)
    assert generate(engine(EARLY), requests, params) == expected
    assert modes["mixed"] >= 2 and modes["deep"] >= 2


def test_drafts_end_at_the_length_that_fits(engine: Factory) -> None:
    """vLLM reduces an automatic --max-model-len to what the KV cache holds, after the
    model has loaded.
    """
    runner = runner_of(
        engine(EARLY, max_model_len=-1, kv_cache_memory_bytes=1 << 20)
    )
    longest = runner.model_config.hf_config.max_position_embeddings
    assert (
        runner.speculator.passes.max_model_len == runner.max_model_len < longest
    )


def test_shallow_work_is_not_done_twice(
    engine: Factory,
    modes: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding runs the last stack alone over the tokens that shallow passes have seen."""
    llm = engine(EARLY)
    speculator = drafter_of(llm)
    first = speculator.cut.stacks[0]
    tokens = []
    stock = type(first).__call__

    def call(self: Any, input_ids: Any, positions: Any, *rest: Any) -> Any:
        if self is first:
            tokens.append(len(positions))
        return stock(
            self,
            input_ids,
            positions,
            *rest,
        )

    monkeypatch.setattr(type(first), "__call__", call)
    request = prompts(1, 20)
    with counting(llm) as seen:
        generate(llm, request, greedy(16))
    assert modes["full"] == 1 and modes["deep"] >= 4 and not modes["mixed"]
    assert seen["fallback_steps"] == 1 and seen["drafting_seconds"] > 0
    # The last step's counters may travel with a step to come.
    assert modes["deep"] - 1 <= seen["deferred_steps"] <= modes["deep"]
    cycles = 1 + modes["deep"]  # each ends in K + 1 shallow passes of one token
    width = speculator.deferred.width
    assert tokens == [len(request[0]["prompt_token_ids"])] + [1] * (
        cycles * width
    )


def test_drafts_below_gamma_are_verified_as_well(engine: Factory) -> None:
    """vLLM schedules them with the batch's others, and what is right among them costs nothing."""
    requests = prompts(2, 40)
    expected = generate(engine(), requests, greedy(16))
    accepted = []
    for gamma in (0, 0.999):
        llm = engine({**EARLY, "gamma": gamma})
        with counting(llm) as seen:
            assert generate(llm, requests, greedy(16)) == expected
        accepted.append(seen["accepted"])
    assert accepted[0] == accepted[1] > 0
