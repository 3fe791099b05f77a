# SPDX-License-Identifier: Apache-2.0
"""Verification on runner V2: output of sampling requests is vLLM's, token for token."""

import itertools
from typing import Any

import preempted
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, full_but
from small import METHODS
from test_token_logprobs import answers
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_ppd.kernels import draws
from vllm_ppd.kernels.draws import draw_rows
from vllm_ppd.kernels.noise import exponential
from vllm_ppd.kernels.sampling import Sampling

pytestmark = pytest.mark.engine
TINY_KV = {**preempted.SMALL_KV, "num_gpu_blocks_override": 5}  # two of three requests fit in


@pytest.fixture(scope="module")
def alone(v2_engine: Factory) -> list[list[int]]:
    """What vLLM says to three requests with a seed without speculation."""
    answers = preempted.outputs(v2_engine(**TINY_KV), (3,), 24)
    preempted.check(answers, answers["alone"])
    return answers["alone"]


@pytest.mark.parametrize(
    ("name", "asynchronous"), full_but({("cp", True), ("early", False)}, itertools.product(METHODS, (False, True)))
)
def test_output_with_a_seed_is_vllms_through_preemptions(
    v2_engine: Factory, alone: list[list[int]], name: str, asynchronous: bool
) -> None:
    """A step that is done again after a preemption has no drafts, and so had other random numbers."""
    llm = v2_engine(METHODS[name], asynchronous, **TINY_KV)
    with counting(llm) as seen:
        answers = preempted.outputs(llm, (3,), 24)
        preempted.check(answers, alone)
    assert seen["preempted"] >= 3 and seen["accepted"] > 10


@pytest.mark.parametrize("name", full_but({"cp"}, METHODS))
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 30}])
def test_sampled_output_is_vllms(v2_engine: Factory, name: str, limits: dict[str, Any]) -> None:
    """Token for token, beside a greedy request; drafts are drawn, too, and some are accepted."""
    params = [greedy(16, temperature=heat, seed=seed, **limits) for seed, heat in enumerate((0.6, 0.8, 1.0, 0.0))]
    llm = v2_engine(METHODS[name])
    with counting(llm) as seen:
        assert generate(llm, prompts(4), params) == generate(v2_engine(), prompts(4), params)
    assert seen["accepted"] > 3


@pytest.mark.parametrize("beside", [{}, {"logprobs": 2}])
def test_log_probabilities_of_chosen_tokens_are_vllms(v2_engine: Factory, beside: dict[str, Any]) -> None:
    """Also in steps that verify drafts, which vLLM's rejection sampler answers without them."""
    params = [greedy(16, logprob_token_ids=[300, 7, 44]), greedy(16, **beside), greedy(16, logprob_token_ids=[5])]
    llm = v2_engine(METHODS["cp"])
    with counting(llm) as seen:
        first, *others = answers(llm, prompts(3), params)
    assert [first, *others] == answers(v2_engine(), prompts(3), params) and seen["accepted"] > 3
    assert first[1] is not None and {300, 7, 44} <= {token for token, *_ in first[1][5]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="draws are in a graph there")
@pytest.mark.parametrize("name", full_but({"cp"}, ("cp", "early")))
def test_drafts_are_drawn_with_the_targets_random_numbers(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With others of the same distribution fewer drafts would be accepted."""
    llm, accepted = v2_engine(METHODS[name]), []
    params = [greedy(40, temperature=2.0, seed=seed) for seed in range(4)]
    for shift in (0, 1):
        monkeypatch.setattr(draws, "exponential", lambda seeds, *rest, by=shift: exponential(seeds + by, *rest))
        with counting(llm) as seen:
            generate(llm, prompts(4), params)
        accepted.append(seen["accepted"])
    assert accepted[0] > 1.5 * accepted[1], accepted


def test_noise_is_vllms() -> None:
    """Whoever draws from the same logits draws the same token."""
    logits = torch.randn(6, 3000)
    heat, rows, positions = torch.tensor([0.5, 1.0, 0.0, 2.0]), torch.tensor([3, 0, 1, 2, 1, 0]), torch.arange(6) + 70
    seeds = torch.tensor([5, -(1 << 63), 1 << 40, -7])
    expected = gumbel_sample(logits, rows.int(), heat, seeds, positions, apply_temperature=True, is_drafting=False)
    sampling = Sampling(heat[rows], seeds=seeds[rows], positions=positions)
    assert draw_rows(logits, sampling)[0].tolist() == expected.tolist()
