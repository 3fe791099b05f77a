# SPDX-License-Identifier: Apache-2.0
"""Verification on runner V2: drafts that a request must not use, requests with a seed, kernels of the first step."""

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
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ppd.vllm_plugins.engine.v2.verification import Verification, accept_drawn

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


def test_drafts_are_accepted_as_long_as_they_are_drawn() -> None:
    """Against a plain loop, for ragged numbers of drafts and drafts that must not be used."""
    rng, width = np.random.default_rng(0), 4
    for _ in range(50):
        counts = rng.integers(1, width + 1, size=5)
        ends = np.concatenate([[0], np.cumsum(counts)])
        drawn, drafts = rng.integers(0, 2, size=(2, ends[-1]))
        drafts[rng.random(ends[-1]) < 0.1] = -1
        tokens, emitted = accept_drawn(
            torch.from_numpy(drawn), torch.from_numpy(drafts), torch.from_numpy(ends.astype(np.int32)), width
        )
        for request, start in enumerate(ends[:-1]):
            number = 1
            while number < counts[request] and drawn[start + number - 1] == drafts[start + number]:
                number += 1
            assert emitted[request] == number
            assert tokens[request, :number].tolist() == drawn[start : start + number].tolist()


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
