# SPDX-License-Identifier: Apache-2.0
"""vLLM alone on runner V2 with our kernels says what it says on runner V1."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import CASES, generate, greedy, prompts
from conftest import DEMO, ROOT, Factory, full_but, runner_of, start_engine
from plain_v2 import MARK

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


@pytest.mark.parametrize("case", full_but(QUICK, sorted(CASES.keys() - {"logprobs"})))
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


def test_vllm_alone_still_asks_for_triton(on_v2: Any) -> None:
    """Beside an engine on V2."""
    with pytest.raises(ValueError, match="requires Triton"):
        start_engine(DEMO, None, additional_config=MARK)


# vLLM's registration of kernels fails in a process in which numba, of vLLM's n-grams, has compiled.
OWN_METHOD_AFTER_OURS = """
from cases import generate, greedy, prompts
from conftest import DEMO, counting, runner_of, start_engine
ours = start_engine(DEMO, {"method": "cp", "model": str(DEMO.parent / "heads" / "cp")})
theirs = start_engine(DEMO, {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3
})
assert type(runner_of(theirs)).__module__ == "vllm.v1.worker.cpu_model_runner"
with counting(theirs) as seen:
    assert generate(theirs, prompts(4), greedy()) == generate(ours, prompts(4), greedy())
assert seen["accepted"] > 0
print("same", flush=True)
"""


@pytest.mark.full
def test_vllms_own_methods_run_after_ours() -> None:
    """On V1, in the process of an engine of ours on V2."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", OWN_METHOD_AFTER_OURS]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert run.stdout.endswith("same\n"), run.stdout + run.stderr[-3000:]


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
