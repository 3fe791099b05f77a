# SPDX-License-Identifier: Apache-2.0
"""vLLM alone keeps its own runner beside ours."""

from pathlib import Path

import pytest
import torch
from conftest import Factory, run_script, runner_of, start_engine
from plain_v2 import MARK

from vllm_ppd.benchmarks.models.eagle import Eagle, EagleOptions
from vllm_ppd.heads.training.target import Target

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="vLLM's own kernels run there"
    ),
]


def test_vllm_alone_still_asks_for_triton(
    engine: Factory, tiny_model: Factory
) -> None:
    """Beside an engine on V2."""
    runners = [
        type(runner_of(engine(**on))).__module__ for on in ({}, {"on_v2": True})
    ]
    worker = "vllm.v1.worker"
    assert runners == [f"{worker}.cpu_model_runner", f"{worker}.cpu.model_runner"]
    with pytest.raises(ValueError, match="requires Triton"):
        start_engine(tiny_model(), None, additional_config=MARK)


# vLLM's registration of kernels fails in a process in which Numba has compiled its
# n-grams, so that method comes last.
BEFORE_AND_AFTER = """
import sys
from cases import CASES
from conftest import runner_of, start_engine

model, eagle = sys.argv[1:]
METHODS = {
    "alone": None,
    "eagle": {"method": "eagle3", "model": eagle, "num_speculative_tokens": 2},
    "ours": {"method": "early", "exit_layer": 3},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}

expected = None
for name in ("alone", "eagle", "ours", "alone", "eagle", "ngram"):
    llm = start_engine(model, METHODS[name])
    said = CASES["batch_16"](llm)
    expected = expected or said
    assert said == expected, name
    module = "vllm_ppd" if name == "ours" else "vllm.v1.worker.cpu_"
    assert type(runner_of(llm)).__module__.startswith(module), name
    assert name in ("alone", "eagle") or llm.counts["accepted"] > 0, name
"""


@pytest.mark.full
def test_vllms_own_methods_before_and_after_ours(
    tiny_model: Factory, tmp_path: Path
) -> None:
    """In one process; the EAGLE head is untrained."""
    model = str(tiny_model())
    target = Target(
        model,
        torch.device("cpu"),
        torch.float32,
        False,
    )
    Eagle(EagleOptions(model=model, data=["-"], out="-"), target).write(
        tmp_path, ""
    )
    run_script(BEFORE_AND_AFTER, model, tmp_path)
