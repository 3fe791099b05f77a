# SPDX-License-Identifier: Apache-2.0
"""What the V2 speculators promise beside the output: no wait for the device, masks, both ways of scheduling."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, runner_of
from replayed import Replayed, call_attention_directly, launches_apart
from small import METHODS, Small
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ppd.kernels.dispatch import SWITCH

pytestmark = pytest.mark.engine

# What makes the host wait for the device: values read as Python numbers, and results whose shape depends on values.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2", "bincount"}


class Waits(TorchDispatchMode):
    """Counts the operations of a block, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean = name.startswith("index") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for part in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        self.seen["indexed by a mask" if boolean else name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> list[str]:
        return sorted(name for name in self.seen if name in WAITS or name == "indexed by a mask")


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("name", METHODS)
def test_proposing_never_waits_for_the_device(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, name: str, sampled: bool
) -> None:
    """Nor does it sort a vocabulary for a chat model's default sampling, by the kernels that a GPU runs."""
    monkeypatch.setenv(SWITCH, "always" if sampled else "0")
    llm = v2_engine(METHODS[name])
    speculator = runner_of(llm).speculator
    stock, modes = speculator.propose, []

    def propose(*args: Any, **kwargs: Any) -> Any:
        with launches_apart(), Waits() as mode:
            modes.append(mode)
            return stock(*args, **kwargs)

    monkeypatch.setattr(speculator, "propose", propose)
    settings = {"temperature": 0.6, "top_p": 0.9} if sampled else {}
    generate(Small(llm, 2, 6), prompts(2), greedy(**settings))
    assert modes and all(mode.seen for mode in modes)
    assert {wait for mode in modes for wait in mode.waits} == set()
    assert not any(mode.seen.keys() & {"sort", "multinomial", "_softmax", "cumsum"} for mode in modes if sampled)


def test_the_watch_sees_waits() -> None:
    with Waits() as mode:
        torch.ones(3)[torch.tensor([True, False, True])].sum().item()
    assert mode.waits == ["_local_scalar_dense", "indexed by a mask"]


@pytest.mark.parametrize("kernels", ["0", pytest.param("always", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("name", METHODS)
def test_asynchronous_scheduling_gives_the_same(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    """Two batches in flight: the host schedules a step before it knows what the one before it said."""
    monkeypatch.setenv(SWITCH, kernels)
    requests, params = prompts(4), [greedy(max_tokens=n) for n in (5, 12, 20, 24)]
    expected = generate(v2_engine(), requests, params)
    llm = v2_engine(METHODS[name], asynchronous=True)
    core = llm.llm_engine.engine_core.engine_core
    assert type(core.scheduler).__name__ == "AsyncScheduler" and core.batch_queue_size == 2
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert seen["accepted"] > 0


@pytest.mark.parametrize(
    ("name", "failing", "limit"),
    [("cp", 3, None), ("cp", 3, 2), ("early", 0, None), ("early", 3, None), ("early", 4, None), ("dynamo", 3, None)],
)
def test_a_step_that_failed_changes_nothing_of_those_to_come(
    v2_engine: Factory, monkeypatch: pytest.MonkeyPatch, name: str, failing: int, limit: int | None
) -> None:
    """vLLM's sampler raises before the drafts of a step: of prompts, of drafts, of both, or one that drafts nothing."""
    requests, params = prompts(5, 60), [greedy(max_tokens=n) for n in (4, 16, 12, 16, 8)]
    options = METHODS[name] | ({"disable_by_batch_size": limit} if limit else {})
    llm, expected = v2_engine(options), generate(v2_engine(), requests, params)
    runner, steps = runner_of(llm), itertools.count()
    stock = runner.sampler.apply_sampling_params

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == failing:
            raise RuntimeError("sampler of a test")
        return stock(*args, **kwargs)

    monkeypatch.setattr(runner.sampler, "apply_sampling_params", fails_once)
    try:
        with pytest.raises(RuntimeError, match="sampler of a test"):
            generate(llm, requests, params)
    finally:
        llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
    runner._dummy_run(8)  # as between other ranks' requests
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert seen["accepted"] > 0


def test_request_that_opts_out_accepts_nothing(v2_engine: Factory) -> None:
    """Its drafts are verified, as vLLM schedules a number a batch, and all rejected."""
    llm = v2_engine(METHODS["cp"])
    accepted = []
    for allowed in (True, False):
        with counting(llm) as seen:
            generate(Small(llm, 2, 24), prompts(2), greedy(extra_args={"ppd_draft": allowed}))
        accepted.append(seen["accepted"])
    assert accepted[0] > 0 == accepted[1]


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_hard_cut_off(v2_engine: Factory, name: str) -> None:
    """In a batch of more requests nobody drafts; vLLM's scheduler keeps to it."""
    llm = v2_engine({**METHODS[name], "disable_by_batch_size": 2})
    crowd = prompts(3, 20)
    with counting(llm) as seen:
        assert generate(llm, crowd, greedy(8)) == generate(v2_engine(), crowd, greedy(8))
    assert seen["drafted"] == 0
    params = [greedy(4), greedy(4), greedy(24)]
    with counting(llm) as seen:
        assert generate(llm, crowd, params) == generate(v2_engine(), crowd, params)
    assert seen["drafted"] > 0  # once a request is left


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines there have real graphs")
@pytest.mark.parametrize("name", METHODS)
def test_replayed_drafts_are_those_of_the_step(v2_engine: Factory, name: str) -> None:
    """As in CUDA graphs, padded batches included: what the host knew at the recording must not matter."""
    requests, params = prompts(3), [greedy(max_tokens=n) for n in (6, 12, 20)]
    expected, llm = generate(v2_engine(), requests, params), v2_engine(METHODS[name])
    speculator, accepted = runner_of(llm).speculator, []
    call_attention_directly(runner_of(llm).model)
    for graphs in (None, Replayed(speculator, "greedy")):
        if graphs is not None:
            graphs.capture()
        speculator.graphs = graphs
        with counting(llm) as seen:
            try:
                assert generate(llm, requests, params) == expected
            finally:
                speculator.graphs = None
        accepted.append(seen["accepted"])
    assert accepted[0] == accepted[1] > 0
    assert graphs is not None and graphs.replays > 4
