# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache, and nothing grows later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import CASES
from conftest import drafter_of, runner_of, start_engine
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_ppd.vllm_plugins.methods.early.proposer import DeferredKVProposer
from vllm_ppd.vllm_plugins.methods.early.saved_states import SavedStates

pytestmark = pytest.mark.engine


def test_saved_states_are_n_plus_1_rows_a_request() -> None:
    states = SavedStates(16, 4, 64, torch.bfloat16, torch.device("cpu"), has_residual=True)
    assert states.hidden.shape == (16 * 4, 64)
    assert states.residual is not None
    assert states.residual.shape == states.hidden.shape
    assert states.hidden.dtype == torch.bfloat16
    assert SavedStates(16, 4, 64, torch.float32, torch.device("cpu"), has_residual=False).residual is None


def test_allocated_before_the_kv_cache_is_sized(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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

    drafter = drafter_of(llm)
    if_profiled(llm, monkeypatch)
    saved = drafter.saved
    assert saved.hidden.shape == (16 * 4, 64)
    assert drafter.probs is not None
    assert drafter.probs.shape == (16, 3, tiny.VOCAB)
    buffers = (saved.hidden, saved.residual, drafter.probs)
    addresses = [buffer.data_ptr() for buffer in buffers]
    CASES["more_than_fit"](llm)
    assert [buffer.data_ptr() for buffer in (saved.hidden, saved.residual, drafter.probs)] == addresses


def if_profiled(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU vLLM's memory profile drafts for every bucket of batch sizes in every way; no sample depends on it."""
    proposer, seen = drafter_of(llm), []
    stock = proposer.drafter.propose

    def propose(step: Any) -> Any:
        way = "greedy" if step.sampling is None else "sampled" if step.sampling.top_k is None else "truncated"
        seen.append((len(step.newest_ids), way))
        return stock(step)

    with monkeypatch.context() as patched:
        patched.setattr(proposer.drafter, "propose", propose)
        patched.setattr(CPUModelRunner, "profile_run", lambda self: None)
        state = torch.get_rng_state()
        runner_of(llm).profile_run()
        assert torch.equal(torch.get_rng_state(), state)
    assert set(seen) == {(n, way) for n in (16, 8, 4, 2, 1) for way in ("greedy", "sampled", "truncated")}
    assert proposer.saved.req_ids is None
