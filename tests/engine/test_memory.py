# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache,
and nothing grows later.
"""

from typing import Any

import pytest
from cases import CASES
from conftest import Factory, drafter_of, results_of, start_engine
from methods import METHODS
from torch import Tensor

from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker

pytestmark = pytest.mark.engine


def of_early(speculator: Any) -> list[Tensor]:
    saved = speculator.deferred.saved
    return [saved.hidden, saved.residual]


def of_learning(speculator: Any) -> list[Tensor]:
    learner = speculator.learner
    sums = [learner.gram, learner.product, learner._factor, learner.solution]
    return [*sums, *speculator.pairs.kept, *speculator.heads.tensors.values()]


@pytest.mark.parametrize(
    ("options", "buffers"),
    [(METHODS["early"], of_early), ({"method": "ppd"}, of_learning)],
    ids=["early", "learning"],
)
def test_allocated_before_the_kv_cache_is_sized(
    tiny_model: Factory, options: Any, buffers: Any
) -> None:
    order: list[str] = []
    with (
        results_of(Speculator, "load_model", lambda _: order.append("loaded")),
        results_of(
            DraftingWorker,
            "determine_available_memory",
            lambda _: order.append("sized"),
        ),
    ):
        llm = start_engine(tiny_model(), options)
    assert order == ["loaded", "sized"]

    def addresses() -> list[int]:
        speculator = drafter_of(llm)
        parts = [*buffers(speculator), speculator.draft_tokens]
        return [part.data_ptr() for part in parts]

    before = addresses()
    CASES["more_than_fit"](llm)
    assert addresses() == before
