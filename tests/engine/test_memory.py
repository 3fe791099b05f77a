# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache,
and nothing grows later.
"""

import pytest
from cases import CASES
from conftest import Factory, drafter_of, results_of, start_engine
from methods import METHODS

from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker
from vllm_ppd.vllm_plugins.methods.early.speculator import DeferredKVSpeculator

pytestmark = pytest.mark.engine


def test_allocated_before_the_kv_cache_is_sized(tiny_model: Factory) -> None:
    order: list[str] = []
    with (
        results_of(
            DeferredKVSpeculator,
            "load_draft_model",
            lambda _: order.append("loaded"),
        ),
        results_of(
            DraftingWorker,
            "determine_available_memory",
            lambda _: order.append("sized"),
        ),
    ):
        llm = start_engine(tiny_model(), METHODS["early"])
    assert order == ["loaded", "sized"]
    speculator = drafter_of(llm)
    saved = speculator.deferred.saved

    def addresses() -> list[int]:
        buffers = (saved.hidden, saved.residual, speculator.draft_tokens)
        return [buffer.data_ptr() for buffer in buffers]

    before = addresses()
    CASES["more_than_fit"](llm)
    assert addresses() == before
