# SPDX-License-Identifier: Apache-2.0
"""vLLM alone on runner V2 with our kernels says what it says on runner V1."""

import pytest
import torch
from cases import CASES
from conftest import Factory, full_but, runner_of, start_engine
from plain_v2 import MARK

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's own kernels run there"),
]
QUICK = {"batch_16", "structured_output", "penalties", "mixed_lengths"}


@pytest.mark.parametrize("case", full_but(QUICK, sorted(CASES.keys() - {"logprobs"})))
def test_same_output(engine: Factory, alone: Factory, case: str) -> None:
    assert CASES[case](engine(on_v2=True)) == alone(case)


def test_same_log_probabilities(engine: Factory, alone: Factory) -> None:
    """To rounding: the two sum up the vocabulary in different orders."""
    for steps, others in zip(CASES["logprobs"](engine(on_v2=True)), alone("logprobs"), strict=True):
        for (token, entries), (other, other_entries) in zip(steps, others, strict=True):
            assert token == other
            assert [entry[0] for entry in entries] == [entry[0] for entry in other_entries]
            assert [entry[1] for entry in entries] == pytest.approx([entry[1] for entry in other_entries], abs=2e-3)


def test_vllm_alone_still_asks_for_triton(engine: Factory, tiny_model: Factory) -> None:
    """Beside an engine on V2."""
    runners = [type(runner_of(engine(**runner))).__module__ for runner in ({}, {"on_v2": True})]
    assert runners == ["vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner"]
    with pytest.raises(ValueError, match="requires Triton"):
        start_engine(tiny_model(), None, additional_config=MARK)
