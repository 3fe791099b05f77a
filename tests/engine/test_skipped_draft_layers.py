# SPDX-License-Identifier: Apache-2.0
"""DynaMo's draft layers in engines: which steps skip them, and who drafts after these, and what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import CASES, generate, greedy, prompts
from conftest import Factory, counting, drafter_of, runner_of
from vllm import SamplingParams

from vllm_ppd.vllm_plugins.draft_length.controller import State

pytestmark = pytest.mark.engine

CUT_OFF = 2
SMALL = {"kv_cache_memory_bytes": 12 * 2 * 6 * 2 * 32 * 32 * 4}  # requests are preempted


class Step:
    """What a step came to."""

    def __init__(self, drafter: Any, runner: Any, ran: bool, drafts: list[list[int]]) -> None:
        batch = runner.input_batch
        requests = [runner.requests[name] for name in batch.req_ids]
        self.ran = ran  # the draft layers
        self.texts = [(*request.prompt_token_ids, *request.output_token_ids) for request in requests]
        self.lengths = [len(request.prompt_token_ids) for request in requests]
        self.drafts = dict(zip(self.texts, map(tuple, drafts), strict=True))
        # Tokens that a request did not emit itself, or not the step before.
        starts = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        emitted = [len(text) - start for text, start in zip(self.texts, starts, strict=True)]
        self.prompts = (
            any(start < length for start, length in zip(starts, self.lengths, strict=True))
            or max(emitted) > 2 + drafter.config.num_speculative_tokens
        )


@pytest.fixture
def steps_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Step]]:
    """steps_of(llm): the steps that an engine takes from now on."""

    def get(llm: Any) -> list[Step]:
        drafter, runner = drafter_of(llm), runner_of(llm)
        draft, branches, steps, calls = drafter.draft, drafter.cut.branches, [], []

        def drafted(step: Any) -> Any:
            made = draft(step)
            steps.append(Step(drafter, runner, bool(calls), made))
            calls.clear()
            return made

        monkeypatch.setattr(drafter, "draft", drafted)
        monkeypatch.setattr(drafter.cut, "branches", lambda *state: calls.append(1) or branches(*state))
        return steps

    return get


def test_decode_steps_above_the_cut_off_skip_them(engine: Factory, fitted_heads: Factory, steps_of: Factory) -> None:
    """Who was there drafts no more, nor who goes on from its output; who starts from a prompt of then does."""
    options = {"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "disable_by_batch_size": CUT_OFF}
    llm = engine(options, enable_prefix_caching=True)
    steps, requests, limits = steps_of(llm), prompts(5, longest=200)[::-1], [greedy(12)] * 3 + [greedy(40)] * 2
    with counting(llm) as seen:
        outputs = generate(llm, requests, limits)
    assert outputs == generate(engine(), requests, limits)
    crowds = [len(step.texts) > CUT_OFF for step in steps]
    assert any(crowds) and crowds[-1] is False
    assert all(step.ran == step.prompts for step in steps[crowds.index(True) :])  # two are left, who cannot draft
    assert {True, False} == {step.prompts for step in steps if len(step.texts) > CUT_OFF}
    assert not any(any(step.drafts.values()) for step in steps[crowds.index(True) :])
    assert seen["skipped_draft_layer_steps"] == sum(not step.ran for step in steps) > 30

    steps.clear()
    again = [requests[2], {"prompt_token_ids": requests[3]["prompt_token_ids"] + outputs[3]}]
    results = llm.generate(again, greedy(), use_tqdm=False)
    assert [result.num_cached_tokens for result in results] == [96, 96]
    assert [list(result.outputs[0].token_ids) for result in results] == generate(engine(), again, greedy())
    drafted = [sum(map(len, (step.drafts[text] for step in steps for text in step.texts if text[:100] == start)))
               for start in (tuple(request["prompt_token_ids"][:100]) for request in again)]  # fmt: skip
    assert drafted[0] > 20 and drafted[1] == 0


@pytest.mark.parametrize(
    ("family", "case", "settings"),
    [
        ("llama", "arrivals_and_aborts", {}),
        ("llama", "batch_16", SMALL),
        ("gemma3", "arrivals_and_aborts", {}),  # two KV cache groups
    ],
)
def test_drafts_are_those_of_an_engine_that_never_skips(
    family: str, case: str, settings: dict[str, Any], engine: Factory, fitted_heads: Factory,
    steps_of: Factory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the requests that draft, between steps in which drafting is off: prompts in chunks beside decoding requests,
    preemption, and hits on blocks with and without the draft layers' KV."""
    options = {"method": "dynamo", "model": fitted_heads("dynamo", family), "eps_b": 0.0, "adaptive": True}
    llm, stock = engine(options, family=family, enable_prefix_caching=True, **settings), engine(family=family)
    steps, controller = steps_of(llm), drafter_of(llm).planner.controller
    missing_kv = drafter_of(llm).missing_kv
    monkeypatch.setattr(controller, "steps_off", lambda: 0)

    def run(is_off: Callable[[int], bool]) -> list[Step]:
        """Requests draft all they can in a step, or drafting is off; the output is that of vLLM."""
        count = iter(range(10_000))

        def choose(allowed: np.ndarray, *_: Any) -> np.ndarray:
            off = is_off(next(count))
            controller.state, controller._free = State.OFF if off else State.DRAFTING, True
            controller._drafts = np.zeros_like(allowed) if off else allowed
            return controller._drafts

        monkeypatch.setattr(controller, "choose", choose)
        llm.reset_prefix_cache()
        steps.clear()
        said = CASES[case](llm)
        texts = [text for step in steps[:: len(steps) // 8] for text in step.texts[:1]]
        again = [{"prompt_token_ids": list(text)} for text in texts]
        assert [generate(llm, [request], greedy(20))[0] for request in again] == generate(stock, again, greedy(20))
        assert said == CASES[case](stock)
        return list(steps)

    always = run(lambda step: False)
    assert all(step.ran for step in always)
    preempted = llm.counts["preempted"]
    some = run(lambda step: step % 24 >= 12)
    assert not settings or llm.counts["preempted"] > preempted
    expected = {text: drafts for step in always for text, drafts in step.drafts.items() if drafts}
    assert all(step.ran or not step.prompts for step in some)
    made = {text: drafts for step in some for text, drafts in step.drafts.items() if drafts and text in expected}
    # A request that is about to end makes fewer.
    assert all(drafts[: len(expected[text])] == expected[text][: len(drafts)] for text, drafts in made.items())
    assert len(made) > 30
    assert sum(not step.ran for step in some) > 20
    assert missing_kv._groups and missing_kv._groups[0][1].any()


def test_output_with_a_seed_does_not_depend_on_what_is_skipped(
    engine: Factory, fitted_heads: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether drafting is off depends on measurements, and whether layers are skipped on that."""
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "eps_b": 0.0, "adaptive": True})
    planner, params = drafter_of(llm).planner, SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    expected, controller, drafted = generate(engine(), prompts(2, 20), params), planner.controller, []
    monkeypatch.setattr(controller, "_choose", lambda allowed, *_: np.zeros_like(allowed))
    monkeypatch.setattr(controller, "state", State.OFF)
    for chosen_by in (None, controller):
        monkeypatch.setattr(planner, "controller", chosen_by)
        with counting(llm) as seen:
            assert generate(llm, prompts(2, 20), params) == expected
        drafted.append(seen["drafted"])
    assert drafted[0] > 40 and drafted[1] == 0
