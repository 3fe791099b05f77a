# SPDX-License-Identifier: Apache-2.0
"""A sampling request with a seed gives the same output however its prompt is read, and beside whichever others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import generate
from conftest import counter
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine
LENGTHS = (5, 33, 64, 65, 100, 129, 150, 193)  # chunks of 64, some of which leave a single token


def prompt(length: int, offset: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * offset + j * j) % 250 + 2 for j in range(length)]}


def seeded(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": seed, **settings})


def one_by_one(llm: Any, requests: list[Any], params: list[SamplingParams]) -> list[list[int]]:
    return [generate(llm, [request], own)[0] for request, own in zip(requests, params, strict=True)]


@pytest.mark.parametrize("method", ["ppd", "cp", "dynamo"])
def test_prompts_in_chunks_give_the_output_of_whole_prompts(
    engine: Callable[..., Any], fitted_heads: Callable[..., str], method: str
) -> None:
    """vLLM takes the draw of an unfinished prompt back from its generator, which a CPU generator cannot do."""
    options = {"method": method, "adaptive": True, **({} if method == "ppd" else {"model": fitted_heads(method)})}
    whole, chunked = (engine(options, max_num_batched_tokens=most) for most in (512, 64))
    requests, params = [prompt(n, n) for n in LENGTHS], [seeded(5 + i) for i in range(len(LENGTHS))]
    expected = one_by_one(whole, requests, params)
    assert len(set(map(tuple, expected))) == len(LENGTHS)
    assert one_by_one(chunked, requests, params) == expected
    assert generate(chunked, requests, params) == expected
    sampled, greedy = (SamplingParams(temperature=temperature, max_tokens=24) for temperature in (0.9, 0.0))
    among = generate(chunked, [prompt(90, 1), *requests, prompt(140, 2)], [sampled, *params, greedy])
    assert among[1:-1] == expected


@pytest.mark.parametrize("regex", [None, "[a-z]{16}"], ids=["free", "structured"])
def test_requests_repeat_from_the_prefix_cache(
    engine: Callable[..., Any], caplog: pytest.LogCaptureFixture, regex: str | None
) -> None:
    """vLLM pads a request that has one token to compute with placeholder drafts, which would take draws."""
    llm = engine({"method": "ppd", "adaptive": True}, enable_prefix_caching=True, max_num_batched_tokens=512)
    structured = {} if regex is None else {"structured_outputs": StructuredOutputsParams(regex=regex)}
    offset = 0 if regex is None else 100
    requests = [prompt(length, length + offset) for length in range(62, 69)]  # two blocks are 64 tokens
    params = [seeded(i, **structured) for i in range(len(requests))]
    drafts, hits = counter(llm, "vllm:spec_decode_num_drafts"), counter(llm, "vllm:prefix_cache_hits")
    first = one_by_one(llm, requests, params)
    assert len(set(map(tuple, first))) == len(requests)
    assert counter(llm, "vllm:spec_decode_num_drafts") > drafts
    assert one_by_one(llm, requests, params) == first
    assert generate(llm, requests, params) == first
    assert counter(llm, "vllm:prefix_cache_hits") - hits >= 2 * (3 * 32 + 4 * 64)
    assert "Missing cached draft probabilities" not in caplog.text
