# SPDX-License-Identifier: Apache-2.0
"""On runner V2, greedy output equals vLLM's without speculation, token for token, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
from cases import CASES, after_a_prefix, generate, greedy, prompts
from conftest import DEMO, Factory, counting, full_but
from published import LAYOUTS, publish
from small import METHODS, Small
from vllm import SamplingParams

pytestmark = pytest.mark.engine

LONG = {"arrivals_and_aborts", "more_than_fit", "token_limits"}  # drive the engine themselves, or many times


@pytest.fixture(scope="module")
def expected(v2_engine: Factory) -> Callable[[str], Any]:
    answers: dict[str, Any] = {}

    def get(case: str) -> Any:
        if case not in answers:
            answers[case] = CASES[case](Small(v2_engine()))
        return answers[case]

    return get


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", full_but(CASES.keys() - LONG, CASES))
def test_same_tokens(v2_engine: Factory, expected: Factory, name: str, case: str) -> None:
    assert CASES[case](Small(v2_engine(METHODS[name]))) == expected(case)


@pytest.mark.parametrize("name", METHODS)
def test_drafts_are_accepted(v2_engine: Factory, name: str) -> None:
    """The suite above would pass without drafting."""
    llm = v2_engine(METHODS[name])
    with counting(llm) as seen:
        generate(Small(llm, 3, 24), prompts(3), greedy())
    assert 0.04 < seen["accepted"] / seen["drafted"] < 1


@pytest.mark.parametrize(
    ("kind", "how"), [("cp", {"rank": 2, "condition": "recurrent", "layers": (2, 8)}), ("recurrent", {})]
)
def test_heads_with_a_recurrent_state(v2_engine: Factory, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    """More drafts than positions were trained, in the graph of drafts; fitted to what the model says."""
    requests = prompts(4)
    params = [*[greedy(24)] * 3, SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)]
    expected = generate(v2_engine(), requests, params)
    said = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in zip(requests, expected, strict=True)]
    heads = overfitted.fit(DEMO, kind, said, tmp_path / "heads", 60, **how)
    llm = v2_engine({"method": kind, "model": str(heads), "num_speculative_tokens": 5, "draft_vocab_size": 1024})
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert 0.2 < seen["accepted"] / seen["drafted"] < 1


@pytest.mark.parametrize("layout", full_but(["arctic-lstm"], LAYOUTS))
def test_published_speculators(v2_engine: Factory, tmp_path: Path, layout: str) -> None:
    heads = publish(tmp_path / "heads", layout, hidden=192, vocab=4096)
    drafting, alone = (generate(v2_engine(options), prompts(2), greedy(8)) for options in ({"model": str(heads)}, None))
    assert drafting == alone


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_preemption(v2_engine: Factory, name: str) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode, and come back to other rows."""
    block = 2 * 2 * 32 * 4 * 32  # bytes of a layer: keys and values, 2 heads of 32 numbers, 32 tokens
    outputs = []
    for options, layers in ((None, 12), (METHODS[name], 14 if name == "dynamo" else 12)):
        llm = v2_engine(options, kv_cache_memory_bytes=10 * layers * block)
        outputs.append(generate(llm, prompts(4), greedy(64)))
    assert llm.counts["preempted"] > 0
    assert outputs[1] == outputs[0]


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_prefix_cache_hits(v2_engine: Factory, name: str) -> None:
    """What is generated from cached blocks, decoded ones included, is the same."""
    expected, answers = (
        after_a_prefix(v2_engine(options, enable_prefix_caching=True), 3, 16) for options in (None, METHODS[name])
    )
    assert answers == expected
