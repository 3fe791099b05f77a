# SPDX-License-Identifier: Apache-2.0
"""vLLM alone on runner V2 with our kernels says what it says on runner V1."""

from typing import Any

import pytest
import torch
from cases import CASES, generate, greedy, prompts
from conftest import DEMO, Factory, counting, full_but, runner_of, start_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's own kernels run there"),
]
QUICK = {"batch_16", "structured_output", "penalties", "mixed_lengths"}


@pytest.fixture(scope="module")
def on_v1() -> Any:
    return start_engine(DEMO, None)


@pytest.fixture(scope="module")
def on_v2(v2_engine: Factory) -> Any:
    return v2_engine(max_num_seqs=16)


@pytest.mark.parametrize("case", full_but(QUICK, CASES.keys() - {"logprobs"}))
def test_same_output(on_v1: Any, on_v2: Any, case: str) -> None:
    assert CASES[case](on_v2) == CASES[case](on_v1)


def test_same_log_probabilities(on_v1: Any, on_v2: Any) -> None:
    """To rounding: the two sum up the vocabulary in different orders."""
    answers = [CASES["logprobs"](llm) for llm in (on_v1, on_v2)]
    for steps, others in zip(*answers, strict=True):
        for (token, entries), (other, other_entries) in zip(steps, others, strict=True):
            assert token == other
            assert [entry[0] for entry in entries] == [entry[0] for entry in other_entries]
            assert [entry[1] for entry in entries] == pytest.approx([entry[1] for entry in other_entries], abs=2e-3)


def test_engines_have_both_runners(on_v1: Any, on_v2: Any) -> None:
    assert type(runner_of(on_v1)).__module__ == "vllm.v1.worker.cpu_model_runner"
    assert type(runner_of(on_v2)).__module__ == "vllm.v1.worker.cpu.model_runner"


def test_vllms_own_methods_stay_as_they_are(on_v1: Any, on_v2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an engine on V2: they run on V1, and V2 still asks for Triton."""
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = start_engine(DEMO, own)
    assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu_model_runner"
    with counting(llm) as seen:
        assert generate(llm, prompts(4), greedy()) == generate(on_v1, prompts(4), greedy())
    assert seen["accepted"] > 0
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="requires Triton"):
        start_engine(DEMO, None)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 8, "min_p": 0.05}])
def test_a_seed_decides_alone(on_v2: Any, limits: dict[str, Any]) -> None:
    """Not the requests beside, nor their order."""
    requests = prompts(6)
    params = [greedy(12, temperature=0.9, seed=seed, **limits) for seed in range(6)]
    together = generate(on_v2, requests, params)
    assert generate(on_v2, requests[::-1], params[::-1]) == together[::-1]
    assert generate(on_v2, requests[2:3], params[2:3]) == together[2:3]
    others = [greedy(12, temperature=0.9, seed=seed + 6, **limits) for seed in range(6)]
    assert generate(on_v2, requests, others) != together
