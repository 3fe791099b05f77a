# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache,
and nothing grows later.
"""

from typing import Any

import pytest
import torch
from cases import CASES
from conftest import Factory, drafter_of, runner_of, start_engine
from methods import METHODS

from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker
from vllm_ppd.vllm_plugins.methods.early.speculator import DeferredKVSpeculator

pytestmark = pytest.mark.engine


def test_allocated_before_the_kv_cache_is_sized(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    load = DeferredKVSpeculator.load_draft_model
    size = DraftingWorker.determine_available_memory

    def load_draft_model(self: DeferredKVSpeculator, *args: Any) -> None:
        load(self, *args)
        order.append("ours")

    def determine_available_memory(self: Any) -> int:
        order.append("kv cache")
        return size(self)

    monkeypatch.setattr(DeferredKVSpeculator, "load_draft_model", load_draft_model)
    monkeypatch.setattr(
        DraftingWorker, "determine_available_memory", determine_available_memory
    )
    llm = start_engine(tiny_model(), METHODS["early"])
    assert order == ["ours", "kv cache"]

    check_profile(llm, monkeypatch)
    buffers = buffers_of(llm)
    # States of each request's newest token and drafts, and those of another that takes
    # what padding writes; drafts.
    assert [tuple(buffer.shape) for buffer in buffers] == [((16 + 1) * 4, 64)] * 2 + [
        (16, 3)
    ]
    addresses = [buffer.data_ptr() for buffer in buffers]
    CASES["more_than_fit"](llm)
    assert [buffer.data_ptr() for buffer in buffers_of(llm)] == addresses


def buffers_of(llm: Any) -> list[torch.Tensor]:
    saved = drafter_of(llm).deferred.saved
    return [saved.hidden, saved.residual, drafter_of(llm).draft_tokens]


def check_profile(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's memory profile drafts for every bucket of batch sizes, drawn or not; no
    sample depends on it.
    """
    drafter = drafter_of(llm).drafter
    seen = set()
    stock = drafter.propose

    def propose(step: Any) -> Any:
        seen.add((len(step.newest_ids), step.sampling is None))
        return stock(step)

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "propose", propose)
        state = torch.get_rng_state()
        runner_of(llm)._dummy_run(16, is_profile=True)
        assert torch.equal(torch.get_rng_state(), state)
    assert seen == {(n, greedy) for n in (16, 8, 4, 2, 1) for greedy in (True, False)}
    assert not drafter_of(llm).deferred.drafted.any()
