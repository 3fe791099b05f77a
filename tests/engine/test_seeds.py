# SPDX-License-Identifier: Apache-2.0
"""A sampling request with a seed gives the output that vLLM alone gives it: whatever
is drafted, however its prompt is read, beside whichever others, and through
preemptions."""

from typing import Any

import numpy as np
import preempted
import pytest
import torch
from cases import generate, greedy, in_turn, prompts, tokens_of
from conftest import Factory, counting, full_but
from heads_folders import sampling_at
from methods import METHODS
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_ppd.kernels import sampling
from vllm_ppd.kernels.sampling import draw_rows, exponential
from vllm_ppd.vllm_plugins.engine.cpu import native

pytestmark = pytest.mark.engine
# Chunks of 64, some of which leave a single token
LENGTHS = (5, 33, 65, 129, 193)
CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}


def prompt(length: int, offset: int = 0) -> dict[str, list[int]]:
    return {
        "prompt_token_ids": [
            (7 * offset + j * j) % 250 + 2 for j in range(length)
        ]
    }


def seeded(seed: int, **settings: Any) -> SamplingParams:
    return greedy(16, **{"temperature": 1.0, "seed": seed} | settings)


@pytest.mark.parametrize("name", METHODS)
def test_prompts_in_chunks_give_the_output_of_whole_prompts(
    engine: Factory,
    drafting: Factory,
    name: str,
) -> None:
    requests = [prompt(n, n) for n in LENGTHS]
    params = [seeded(5 + i) for i in range(len(LENGTHS))]
    expected = in_turn(
        engine(on_v2=True, max_num_batched_tokens=512), requests, params
    )
    assert len(set(map(tuple, expected))) == len(LENGTHS)
    llm = drafting(METHODS[name], max_num_batched_tokens=64)
    assert in_turn(llm, requests, params) == expected
    sampled = SamplingParams(temperature=0.9, max_tokens=24)
    among = [prompt(90, 1), *requests, prompt(140, 2)]
    answers = []
    for each in (llm, engine(on_v2=True, max_num_batched_tokens=512)):
        # vLLM draws the seeds of requests without one
        np.random.seed(0)  # noqa: NPY002
        answers.append(generate(each, among, [sampled, *params, greedy(24)]))
    assert answers[0] == answers[1] and answers[0][1:-1] == expected


@pytest.fixture(scope="module")
def alone(engine: Factory) -> list[list[int]]:
    """What vLLM says to the requests without speculation."""
    answers = preempted.outputs(engine(on_v2=True, **preempted.SMALL_KV))
    preempted.check(answers, answers["alone"])
    return answers["alone"]


MORE = METHODS | {"lookups": METHODS["cp"] | {"prompt_lookup_min": 2}}


@pytest.mark.parametrize("name", full_but({"cp"}, MORE))
def test_output_is_vllms_through_preemptions(
    drafting: Factory,
    alone: list[list[int]],
    name: str,
) -> None:
    """A step that is done again after a preemption has no drafts."""
    llm = drafting(MORE[name], **preempted.SMALL_KV)
    with counting(llm) as seen:
        preempted.check(preempted.outputs(llm), alone)
    assert seen["preempted"] > 6 and seen["accepted"] > 5


@pytest.mark.parametrize("regex", [None, "[a-z]{16}"], ids=["free", "structured"])
def test_requests_repeat_from_the_prefix_cache(
    engine: Factory, regex: str | None
) -> None:
    """vLLM pads a request that has one token to compute with placeholder drafts, which
    would take draws.
    """
    llm = engine({"method": "early", "exit_layer": 3}, **CACHED)
    structured = {}
    if regex is not None:
        structured = {"structured_outputs": StructuredOutputsParams(regex=regex)}
    offset = 100 * len(structured)
    # Two blocks are 64 tokens
    requests = [prompt(length, length + offset) for length in range(62, 69)]
    params = [seeded(i, **structured) for i in range(len(requests))]
    first = in_turn(engine(on_v2=True, **CACHED), requests, params)
    assert len(set(map(tuple, first))) == len(requests)
    with counting(llm) as seen:
        assert in_turn(llm, requests, params) == first
    assert seen["drafted"] > 0
    again = llm.generate(requests, params, use_tqdm=False)
    assert tokens_of(again) == first
    assert sum(output.num_cached_tokens for output in again) >= 3 * 32 + 4 * 64


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="draws are in a graph there"
)
@pytest.mark.parametrize("name", ["cp", "early"])
def test_drafts_are_drawn_with_the_targets_random_numbers(
    drafting: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """With others of the same distribution fewer drafts would be accepted."""
    llm = drafting(METHODS[name])
    accepted = []
    params = [greedy(40, temperature=2.0, seed=seed) for seed in range(8)]
    for shift in (0, 1):
        monkeypatch.setattr(
            sampling,
            "exponential",
            lambda seeds, *rest, by=shift: exponential(seeds + by, *rest),
        )
        with counting(llm) as seen:
            generate(llm, prompts(8), params)
        accepted.append(seen["accepted"])
    assert accepted[0] > 1.5 * accepted[1], accepted


def test_noise_is_vllms() -> None:
    """Whoever draws from the same logits draws the same token."""
    native.register()
    logits = torch.randn(6, 3000)
    heat = torch.tensor([0.5, 1.0, 0.0, 2.0])
    rows = torch.tensor([3, 0, 1, 2, 1, 0])
    positions = torch.arange(6) + 70
    seeds = torch.tensor([5, -(1 << 63), 1 << 40, -7])
    by_row = heat[rows, None]
    expected = gumbel_sample(
        torch.where(by_row > 0, logits / by_row, logits),
        rows.int(),
        heat,
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
    )
    sampling = sampling_at(heat[rows])
    sampling = sampling._replace(seeds=seeds[rows], positions=positions)
    assert draw_rows(logits, sampling).tolist() == expected.tolist()
