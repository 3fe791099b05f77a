# SPDX-License-Identifier: Apache-2.0
"""vLLM alone on runner V2 with our kernels says what it says on runner V1."""

from typing import Any

import pytest
import torch
from cases import CASES, generate, greedy, prompts
from conftest import DEMO, Factory, full_but, start_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's own kernels run there"),
]
QUICK = {"batch_16", "structured_output", "penalties", "logprobs", "mixed_lengths"}


@pytest.fixture(scope="module")
def on_v1() -> Any:
    return start_engine(DEMO, None)


@pytest.fixture(scope="module")
def on_v2(v2_engine: Factory) -> Any:
    return v2_engine(max_num_seqs=16)


@pytest.mark.parametrize("case", full_but(QUICK, CASES))
def test_same_output(on_v1: Any, on_v2: Any, case: str) -> None:
    assert CASES[case](on_v2) == CASES[case](on_v1)


def test_engines_have_both_runners(on_v1: Any, on_v2: Any) -> None:
    runners = [
        type(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner).__module__
        for llm in (on_v1, on_v2)
    ]
    assert runners == ["vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner"]


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
