# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification with our confidences: the drafts of a step that pay, over all requests of the batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, runner_of
from methods import METHODS
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

pytestmark = pytest.mark.engine


@pytest.fixture
def adaptive(
    drafting: Factory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., tuple[Any, list[Any]]]:
    """An engine that verifies adaptively, as one with CUDA graphs does; and (scheduled, verified) drafts by step."""

    def get(name: str, of_a_token: float) -> tuple[Any, list[Any]]:
        llm = drafting(METHODS[name])
        runner = runner_of(llm)
        speculator, most = runner.speculator, runner.max_num_tokens
        manager = adaptive_verification.AdaptiveVerificationManager(
            runner.req_states, runner.input_buffers.query_start_loc, 1, most
        )
        # A step costs 1, and this much more a token.
        manager.cost_tables = (np.zeros(runner.max_num_reqs + 1), 1 + of_a_token * np.arange(most + 1))
        monkeypatch.setattr(
            adaptive_verification,
            "_assign_draft_token_budget_compiled",
            adaptive_verification._assign_draft_token_budget,
        )
        monkeypatch.setattr(runner, "adaptive_verification", manager)
        monkeypatch.setattr(speculator, "enable_adaptive_verification", True)
        monkeypatch.setattr(speculator.host, "confidence", speculator.draft_token_confidence_probs)
        request.addfinalizer(lambda: setattr(runner.rejection_sampler, "enable_adaptive_verification", False))
        runner.rejection_sampler.enable_adaptive_verification = True
        steps: list[Any] = []
        stock = speculator.begin_step

        def begin_step(batch: Any) -> None:
            stock(batch)
            if batch.num_draft_tokens_per_req is not None:
                mode = speculator.deferred.mode if hasattr(speculator, "deferred") else ""
                steps.append((int(batch.num_draft_tokens_per_req.sum()), batch.num_draft_tokens, mode))

        monkeypatch.setattr(speculator, "begin_step", begin_step)
        return llm, steps

    return get


@pytest.mark.parametrize("name", METHODS)
def test_output_is_the_same(engine: Factory, adaptive: Factory, name: str) -> None:
    """Where drafts of a batch are left out, the others are verified, and early drafting's states are still matched."""
    requests, params = prompts(3, 20), [greedy(max_tokens=n) for n in (24, 12, 24)]
    expected = generate(engine(), requests, params)
    llm, steps = adaptive(name, 0.03 if name == "early" else 0.1)
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert seen["accepted"] > 0
    assert any(0 < verified < scheduled for scheduled, verified, _ in steps)
    if name == "early":
        assert any(mode == "deep" and verified < scheduled for scheduled, verified, mode in steps)


@pytest.mark.parametrize("name", METHODS)
def test_confidence_is_of_drafts_that_may_be_used(
    adaptive: Factory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Probabilities; 0 where a draft must not be used. Accepted drafts have more of it than rejected ones."""
    llm, _ = adaptive(name, 0.0)
    runner = runner_of(llm)
    speculator, seen = runner.speculator, []
    stock = speculator.propose

    def propose(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = stock(batch, *args, **kwargs)
        # Not after a chunk that leaves the prompt unfinished.
        drafted = speculator.host.staging.rows[: batch.num_reqs] >= 0
        confidence = speculator.draft_token_confidence_probs[: batch.num_reqs][drafted].clone()
        may_draft = torch.from_numpy(speculator.host.options.drafting)[batch.idx_mapping[drafted].long()]
        seen.append((confidence, may_draft))
        return drafts

    monkeypatch.setattr(speculator, "propose", propose)
    opted_out = [greedy(12, extra_args={"ppd_draft": allowed}) for allowed in (True, False)]
    generate(llm, prompts(2), opted_out)
    confidence, may_draft = (torch.cat([step[i] for step in seen]) for i in range(2))
    assert may_draft.any() and not may_draft.all()
    first = confidence[may_draft, 0]  # those behind it may be more than the method stands for
    assert ((first > 0) & (first <= 1 + 1e-5)).any() and confidence.max() <= 1 + 1e-5
    assert not confidence[~may_draft].any()


def test_drafts_that_never_pay_are_left_out(adaptive: Factory) -> None:
    llm, steps = adaptive("cp", 100.0)
    with counting(llm) as seen:
        generate(llm, prompts(2), greedy(8))
    # The first drafts of a request count as sure: their confidence is known a step later.
    assert sum(verified for _, verified, _ in steps) < sum(scheduled for scheduled, _, _ in steps) / 2
    assert seen["drafted"] > 0
