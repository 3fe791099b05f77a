# SPDX-License-Identifier: Apache-2.0
"""Everything of ours is allocated when the model loads, before vLLM sizes its KV cache,
and nothing grows later.
"""

from typing import Any

import pytest
from cases import CASES
from conftest import Factory, drafter_of, start_engine
from methods import METHODS
from torch import Tensor

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
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
    buffers: Any,
) -> None:
    def addresses(speculator: Any) -> list[int]:
        parts = [*buffers(speculator), speculator.draft_tokens]
        return [part.data_ptr() for part in parts]

    stock = DraftingWorker.determine_available_memory
    before: list[int] = []

    def size(self: Any) -> Any:
        before.extend(addresses(self.model_runner.speculator))
        return stock(self)

    monkeypatch.setattr(DraftingWorker, "determine_available_memory", size)
    llm = start_engine(tiny_model(), options)
    CASES["more_than_fit"](llm)
    assert addresses(drafter_of(llm)) == before
