# SPDX-License-Identifier: Apache-2.0
"""Verification on runner V2: output of sampling requests is vLLM's, token for token; kernels of the first step."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import preempted
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, full_but
from small import METHODS
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ppd.kernels import draws
from vllm_ppd.kernels.draws import draw_rows
from vllm_ppd.kernels.noise import exponential
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.vllm_plugins.engine.v2.verification import Verification

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


def test_seeds_change_nothing_for_requests_without(v2_engine: Factory) -> None:
    """In a batch of both, greedy output is vLLM's, and a request with a seed says what it says alone."""
    llm, params = v2_engine(METHODS["cp"]), greedy(12)
    seeded, free = greedy(12, temperature=0.9, seed=7), greedy(12, temperature=0.9)
    first = generate(v2_engine(), prompts(1), seeded)
    company = generate(llm, prompts(1) + prompts(3)[1:], [seeded, free, params])
    assert company[0] == first[0]
    assert company[2] == generate(v2_engine(), prompts(3)[2:], params)[0]


@pytest.mark.parametrize("name", full_but({"cp"}, METHODS))
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 30}])
def test_sampled_output_is_vllms(v2_engine: Factory, name: str, limits: dict[str, Any]) -> None:
    """Token for token, as a chat model's defaults ask for it; drafts are drawn, too, and some are accepted."""
    params = [greedy(16, temperature=heat, seed=seed, **limits) for seed, heat in enumerate((0.6, 0.8, 1.0))]
    llm = v2_engine(METHODS[name])
    with counting(llm) as seen:
        assert generate(llm, prompts(3), params) == generate(v2_engine(), prompts(3), params)
    assert seen["accepted"] > 3


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


def test_kernels_for_greedy_requests_are_compiled_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own dummy requests ask for every way of sampling; without one, its kernels read logits of another type."""
    calls, needed = [], np.array([True, False, True])

    def stock(self: Any, logits: torch.Tensor, *args: Any) -> int:
        calls.append((len(logits), needed.tolist()))
        return len(calls)

    monkeypatch.setattr(RejectionSampler, "__call__", stock)
    verification: Any = object.__new__(Verification)  # what vLLM's constructor reads differs between its versions
    verification.speculator = SimpleNamespace(unusable=lambda batch: torch.zeros(1, dtype=torch.bool))
    verification.sampler, verification._compiled = SimpleNamespace(needs_logits_processing=needed), False
    batch = SimpleNamespace(num_reqs=2)
    assert verification(torch.zeros(2, 5), batch) == 1  # no drafts
    assert verification(torch.zeros(6, 5), batch) == 3
    assert verification(torch.zeros(6, 5), batch) == 4
    asked = [True, False, True]
    assert calls == [(2, asked), (6, [False] * 3), (6, asked), (6, asked)]
