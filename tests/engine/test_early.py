# SPDX-License-Identifier: Apache-2.0
"""Early drafting: which steps take saved states, and what they save."""

from collections import Counter
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, drafter_of, runner_of
from methods import METHODS

from vllm_ppd.vllm_plugins.engine.metrics import totals

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


def test_decoding_runs_the_deep_layers_alone(
    engine: Factory, modes: Counter[str]
) -> None:
    llm = engine(EARLY)
    before = totals()
    generate(llm, prompts(2, 20), greedy(16))
    assert modes["full"] == 1  # both prompts fit one step
    # The last step's counters may travel with a step to come.
    assert (
        modes["deep"] - 1
        <= totals()["deferred_steps"] - before["deferred_steps"]
        <= modes["deep"]
    )
    assert modes["deep"] >= 4 and not modes["mixed"]


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
    runner = runner_of(engine(EARLY, max_model_len=-1, kv_cache_memory_bytes=1 << 20))
    longest = runner.model_config.hf_config.max_position_embeddings
    assert runner.speculator.passes.max_model_len == runner.max_model_len < longest


def test_shallow_work_is_not_done_twice(
    engine: Factory, modes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deep and mixed steps the first stack sees no token that a shallow pass has seen."""
    speculator = drafter_of(engine(EARLY))
    first = speculator.cut.stacks[0]
    tokens = []
    stock = type(first).__call__

    def call(self: Any, input_ids: Any, positions: Any, *rest: Any) -> Any:
        if self is first:
            tokens.append(len(positions))
        return stock(self, input_ids, positions, *rest)

    monkeypatch.setattr(type(first), "__call__", call)
    request = prompts(1, 20)
    decoded = 12
    generate(engine(EARLY), request, greedy(decoded))
    cycles = 1 + modes["deep"]  # each ends in K + 1 shallow passes of one token
    width = speculator.deferred.width
    assert tokens == [len(request[0]["prompt_token_ids"])] + [1] * (cycles * width)


def test_a_captured_pass_attends_to_the_whole_sequence(
    engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's Triton backend sets the sequence lengths to 1 for a capture, which each
    replay of ours would repeat.
    """
    speculator = drafter_of(engine(EARLY))
    passes = speculator.passes
    staged = speculator.staging.staged
    rows = 2
    device = speculator.device
    builder = type(speculator.attn_groups[0][0].get_metadata_builder())
    monkeypatch.setattr(builder, "build_for_cudagraph_capture", as_triton_does)
    passes.prepare_capture(rows)
    integers = staged.positions[:rows] = torch.tensor([7, 9], device=device)
    speculator.staging.stage_nobody()
    passes.one_token(1, integers)
    assert passes.seq_lens[:rows].tolist() == [1, 1]  # nobody's
    staged.rows[:rows] = torch.arange(rows, device=device)
    passes.one_token(1, integers)
    assert passes.seq_lens[:rows].tolist() == [9, 11]


def as_triton_does(self: Any, common_attn_metadata: Any) -> Any:
    metadata = self.build(0, common_attn_metadata)
    common_attn_metadata.seq_lens.fill_(1)
    return metadata


def test_drafts_below_gamma_are_verified_as_well(engine: Factory) -> None:
    """vLLM schedules them with the batch's others, and what is right among them costs nothing."""
    requests = prompts(2, 40)
    accepted = []
    for llm in (engine(EARLY), engine({**EARLY, "gamma": 0.999})):
        with counting(llm) as seen:
            assert generate(llm, requests, greedy(16)) == generate(
                engine(), requests, greedy(16)
            )
        accepted.append(seen["accepted"])
    assert accepted[0] == accepted[1] > 0
