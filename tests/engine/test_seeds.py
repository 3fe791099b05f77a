# SPDX-License-Identifier: Apache-2.0
"""A sampling request with a seed gives the output that vLLM alone gives it: whatever is drafted, however its prompt is
read, beside whichever others, and through preemptions."""

from typing import Any

import preempted
import pytest
from cases import generate, greedy, prompts
from conftest import DEMO, Factory, counter, counting, full_but, start_engine
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine
HEADS = DEMO.parent / "heads"
METHODS = {
    "cp": {"method": "cp", "model": str(HEADS / "cp")},
    "lookups": {"method": "cp", "model": str(HEADS / "cp"), "prompt_lookup_min": 2},
    "early": {"method": "ppd", "model": str(HEADS / "early"), "draft_sample_method": "probabilistic"},
    "several exits": {"method": "ppd", "model": str(HEADS / "early"), "exit_layer": [6, 9]},
    "parallel schedule": {"method": "paradecode", "model": str(HEADS / "early"), "schedule": "parallel"},
    "dynamo": {"method": "dynamo", "model": str(HEADS / "dynamo")},
}
LENGTHS = (5, 33, 64, 65, 100, 129, 150, 193)  # chunks of 64, some of which leave a single token


def prompt(length: int, offset: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * offset + j * j) % 250 + 2 for j in range(length)]}


def seeded(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": seed, **settings})


def in_turn(llm: Any, requests: list[Any], params: list[SamplingParams]) -> list[list[int]]:
    return [generate(llm, [request], param)[0] for request, param in zip(requests, params, strict=True)]


@pytest.mark.parametrize("method", ["ppd", "cp", "dynamo", "recurrent"])
def test_prompts_in_chunks_give_the_output_of_whole_prompts(
    engine: Factory, fitted_heads: Factory, method: str
) -> None:
    """vLLM takes the draw of an unfinished prompt back from its generator, which a CPU generator cannot do."""
    options = {"method": method, "adaptive": True, **({} if method == "ppd" else {"model": fitted_heads(method)})}
    whole, chunked = (engine(options, max_num_batched_tokens=most) for most in (512, 64))
    requests, params = [prompt(n, n) for n in LENGTHS], [seeded(5 + i) for i in range(len(LENGTHS))]
    expected = in_turn(whole, requests, params)
    assert len(set(map(tuple, expected))) == len(LENGTHS)
    assert in_turn(chunked, requests, params) == expected
    assert generate(chunked, requests, params) == expected
    sampled, greedy = (SamplingParams(temperature=temperature, max_tokens=24) for temperature in (0.9, 0.0))
    among = generate(chunked, [prompt(90, 1), *requests, prompt(140, 2)], [sampled, *params, greedy])
    assert among[1:-1] == expected


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What vLLM says to the requests without speculation."""
    answers = preempted.outputs(start_engine(DEMO, None, **preempted.SMALL_KV))
    preempted.check(answers, answers["alone"])
    return answers["alone"]


@pytest.mark.parametrize("name", full_but(METHODS.keys() - {"several exits", "parallel schedule"}, METHODS))
def test_output_is_vllms_through_preemptions(alone: list[list[int]], name: str) -> None:
    """A step that is done again after a preemption has no drafts, and so had other random numbers."""
    llm = start_engine(DEMO, METHODS[name], **preempted.SMALL_KV)
    preempted.check(preempted.outputs(llm), alone)
    assert llm.counts["preempted"] > 6 and llm.counts["accepted"] > 60


@pytest.mark.parametrize("sampling", [{"top_k": 20, "top_p": 0.9}, {"presence_penalty": 1.5}, {"logprobs": 2}])
def test_output_is_vllms_with_other_ways_of_sampling(engine: Factory, sampling: dict[str, Any]) -> None:
    llm = engine({"method": "ppd", "exit_layer": 5})
    params = [seeded(i, temperature=0.7, **sampling) for i in range(4)]
    company = [greedy(30), *params, SamplingParams(temperature=1.0, max_tokens=20)]
    with counting(llm) as seen:
        assert generate(llm, prompts(6, 30), company)[1:-1] == generate(engine(), prompts(6, 30)[1:-1], params)
    assert seen["accepted"] > 0


@pytest.mark.parametrize("regex", [None, "[a-z]{16}"], ids=["free", "structured"])
def test_requests_repeat_from_the_prefix_cache(
    engine: Factory, caplog: pytest.LogCaptureFixture, regex: str | None
) -> None:
    """vLLM pads a request that has one token to compute with placeholder drafts, which would take draws."""
    llm = engine({"method": "ppd", "exit_layer": 3}, enable_prefix_caching=True, max_num_batched_tokens=512)
    structured = {} if regex is None else {"structured_outputs": StructuredOutputsParams(regex=regex)}
    offset = 0 if regex is None else 100
    requests = [prompt(length, length + offset) for length in range(62, 69)]  # two blocks are 64 tokens
    params = [seeded(i, **structured) for i in range(len(requests))]
    drafts, hits = counter(llm, "vllm:spec_decode_num_drafts"), counter(llm, "vllm:prefix_cache_hits")
    first = in_turn(llm, requests, params)
    assert len(set(map(tuple, first))) == len(requests)
    assert counter(llm, "vllm:spec_decode_num_drafts") > drafts
    assert in_turn(llm, requests, params) == first
    assert generate(llm, requests, params) == first
    assert counter(llm, "vllm:prefix_cache_hits") - hits >= 2 * (3 * 32 + 4 * 64)
    assert "Missing cached draft probabilities" not in caplog.text
