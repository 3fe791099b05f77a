# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache,
and nothing grows later.
"""

from typing import Any

import pytest
from cases import CASES
from conftest import Factory, drafter_of, start_engine
from methods import METHODS

from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker
from vllm_ppd.vllm_plugins.methods.early.speculator import DeferredKVSpeculator

pytestmark = pytest.mark.engine


def test_allocated_before_the_kv_cache_is_sized(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def watch(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def noted(*args: Any) -> Any:
            order.append(name)
            return stock(*args)

        monkeypatch.setattr(owner, name, noted)

    watch(DeferredKVSpeculator, "load_draft_model")
    watch(DraftingWorker, "determine_available_memory")
    llm = start_engine(tiny_model(), METHODS["early"])
    assert order == ["load_draft_model", "determine_available_memory"]
    speculator = drafter_of(llm)
    saved = speculator.deferred.saved
    buffers = (saved.hidden, saved.residual, speculator.draft_tokens)
    addresses = [buffer.data_ptr() for buffer in buffers]
    CASES["more_than_fit"](llm)
    buffers = (saved.hidden, saved.residual, speculator.draft_tokens)
    assert [buffer.data_ptr() for buffer in buffers] == addresses
