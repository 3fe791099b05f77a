# SPDX-License-Identifier: Apache-2.0
"""Engines whose drafting runs our Triton kernels: no wait for the device, and vLLM's output."""

import functools
from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import DEMO, accepting, drafter_of, start_engine
from methods import ON_DEMO
from waits import watching

from vllm_ppd.kernels import dispatch

pytestmark = pytest.mark.engine
KERNELS = {
    "cp": {"draft_chain"},
    "early": {"draw_rows"},
    "dynamo": {"find_peaks", "back_off", "draw_ngrams"},
}


@functools.cache
def engine(name: str | None = None) -> Any:
    return start_engine(DEMO, name and ON_DEMO[name], max_num_seqs=4)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that run."""
    used = set()
    find = dispatch.namesake

    def noted(reference: Any) -> Any:
        used.add(reference.__name__)
        return find(reference)

    monkeypatch.setenv(dispatch.SWITCH, "always")
    monkeypatch.setattr(dispatch, "namesake", noted)
    return used


@pytest.mark.parametrize("name", ON_DEMO)
def test_proposing_neither_waits_nor_sorts(name: str, kernels: set[str]) -> None:
    """Nor does it sort a vocabulary for a chat model's default sampling."""
    llm = engine(name)
    with watching(drafter_of(llm), "propose") as modes:
        generate(llm, prompts(2), greedy(6, temperature=0.6, top_p=0.9))
    assert kernels == {"stage", "accept_drawn"} | KERNELS[name]
    assert {wait for mode in modes for wait in mode.waits} == set()
    assert not any(
        mode.operations.keys() & {"sort", "multinomial", "_softmax", "cumsum"}
        for mode in modes
    )


@pytest.mark.parametrize("name", ON_DEMO)
def test_output_is_vllms(name: str) -> None:
    requests = prompts(4, 60)
    params = [greedy(max_tokens=n) for n in (3, 6, 9, 12)]
    llm = engine(name)
    with accepting(llm):
        assert generate(llm, requests, params) == generate(
            engine(), requests, params
        )
