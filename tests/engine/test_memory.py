# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache, and nothing grows later."""

from typing import Any

import pytest
import tiny
import torch
from cases import CASES
from conftest import Factory, drafter_of, runner_of, start_engine
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_ppd.vllm_plugins.methods.early.proposer import DeferredKVProposer

pytestmark = pytest.mark.engine


def test_allocated_before_the_kv_cache_is_sized(tiny_model: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ppd.vllm_plugins.engine.v1.worker import DraftingWorker

    order: list[str] = []
    load, size = DeferredKVProposer.load_model, DraftingWorker.determine_available_memory

    def load_model(self: DeferredKVProposer, model: Any) -> None:
        load(self, model)
        order.append("ours")

    def determine_available_memory(self: Any) -> int:
        order.append("kv cache")
        return size(self)

    monkeypatch.setattr(DeferredKVProposer, "load_model", load_model)
    monkeypatch.setattr(DraftingWorker, "determine_available_memory", determine_available_memory)
    llm = start_engine(tiny_model(), {"method": "ppd", "exit_layer": [2, 4], "gamma": 0.03})
    assert order == ["ours", "kv cache"]

    if_profiled(llm, monkeypatch)
    buffers = buffers_of(drafter_of(llm))
    # States of each request's newest token and drafts, and those of another that takes what padding writes; q(x).
    assert [tuple(buffer.shape) for buffer in buffers] == [((16 + 1) * 4, 64)] * 2 + [(16, 3, tiny.VOCAB)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    CASES["more_than_fit"](llm)
    assert [buffer.data_ptr() for buffer in buffers_of(drafter_of(llm))] == addresses


def buffers_of(proposer: Any) -> list[torch.Tensor]:
    saved = proposer.deferred.saved
    return [saved.hidden, saved.residual, proposer.q_rows]


def if_profiled(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU vLLM's memory profile drafts for every bucket of batch sizes, drawn or not; no sample depends on it."""
    proposer, seen = drafter_of(llm), []
    drafter = proposer.host.drafter
    stock = drafter.propose

    def propose(step: Any) -> Any:
        seen.append((len(step.newest_ids), step.sampling is None))
        return stock(step)

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "propose", propose)
        patched.setattr(CPUModelRunner, "profile_run", lambda self: None)
        state = torch.get_rng_state()
        runner_of(llm).profile_run()
        assert torch.equal(torch.get_rng_state(), state)
    assert set(seen) == {(n, greedy) for n in (16, 8, 4, 2, 1) for greedy in (True, False)}
    assert not proposer.deferred.drafted.any()
