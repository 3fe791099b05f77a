# SPDX-License-Identifier: Apache-2.0
"""What speculators promise beside the output: no wait for the device, steps that may
fail, CUDA graphs.
"""

import itertools
from typing import Any

import pytest
import torch
from cases import CLASSIFIERS, RECURRENT, generate, greedy, prompts
from conftest import Factory, accepting, counting, drafter_of, runner_of
from methods import METHODS, WITH_RECURRENT
from replayed import Replayed, call_attention_directly
from vllm import SamplingParams
from waits import watching

pytestmark = pytest.mark.engine
MORE: dict[str, dict[str, Any]] = WITH_RECURRENT | {
    "classifiers": {"method": "early", "gamma": 0.02, "heads": CLASSIFIERS},
    "cp-recurrent": {
        "method": "cp",
        "draft_vocab_size": 100,
        "heads": RECURRENT,
    },
}


@pytest.mark.parametrize("name", MORE)
def test_proposing_never_waits_for_the_device(
    drafting: Factory,
    name: str,
) -> None:
    llm = drafting(MORE[name])
    with accepting(llm), watching(drafter_of(llm), "propose") as modes:
        generate(llm, prompts(6), greedy(12))
        generate(
            llm,
            prompts(6),
            SamplingParams(
                temperature=0.8,
                top_k=20,
                top_p=0.9,
                max_tokens=12,
            ),
        )
    assert not set().union(*(mode.waits for mode in modes))


@pytest.mark.parametrize(
    ("name", "failing", "options"),
    [
        ("cp", 3, {}),
        ("cp", 3, {"disable_by_batch_size": 2}),
        ("early", 0, {}),
        ("early", 3, {}),
        ("early", 4, {}),
        ("dynamo", 3, {}),
    ],
)
def test_a_step_that_failed_changes_nothing_of_those_to_come(
    engine: Factory,
    drafting: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failing: int,
    options: dict[str, Any],
) -> None:
    """vLLM's sampler raises before the drafts of a step: of prompts, of drafts, of
    both, or one that drafts nothing.
    """
    requests = prompts(5, 60)
    params = [greedy(max_tokens=n) for n in (4, 40, 12, 40, 8)]
    llm = drafting(METHODS[name] | options)
    expected = generate(engine(), requests, params)
    runner = runner_of(llm)
    steps = itertools.count()
    stock = runner.sampler.apply_sampling_params

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == failing:
            raise RuntimeError("sampler of a test")
        return stock(*args, **kwargs)

    monkeypatch.setattr(
        runner.sampler,
        "apply_sampling_params",
        fails_once,
    )
    with pytest.raises(RuntimeError, match="sampler of a test"):
        generate(llm, requests, params)
    unfinished = list(llm.llm_engine.output_processor.request_states)
    llm.llm_engine.abort_request(unfinished, internal=True)
    runner._dummy_run(8)  # as between other ranks' requests
    with accepting(llm):
        assert generate(llm, requests, params) == expected


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="engines there have real graphs"
)
@pytest.mark.parametrize("name", METHODS)
def test_replayed_drafts_are_those_of_the_step(
    engine: Factory,
    drafting: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """As in CUDA graphs, padded batches included: what the host knew at the recording
    must not matter.
    """
    requests = prompts(3)
    params = [greedy(max_tokens=n) for n in (6, 12, 20)]
    expected = generate(engine(), requests, params)
    llm = drafting(METHODS[name])
    speculator = drafter_of(llm)
    call_attention_directly(runner_of(llm).model)
    with counting(llm) as eager:
        assert generate(llm, requests, params) == expected
    graphs = Replayed(speculator)
    graphs.capture()
    monkeypatch.setattr(speculator, "graphs", graphs)
    with counting(llm) as replayed:
        assert generate(llm, requests, params) == expected
    assert eager["accepted"] == replayed["accepted"] > 0
    assert graphs.replays > 4
