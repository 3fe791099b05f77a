# SPDX-License-Identifier: Apache-2.0
"""Several exits: whose states a step may use, and which exits have CUDA graphs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.speculator import Speculator
from vllm_ppd.vllm_plugins.methods.early import speculator
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import (
    DeferredKV,
    SavedStates,
)
from vllm_ppd.vllm_plugins.methods.early.speculator import (
    DeferredKVSpeculator,
    GraphsByExit,
)


def test_states_of_another_exit_expire() -> None:
    """A request that skips a step in which the exit changes has none any more."""
    drafts = 2
    saved = SavedStates(12, 8, torch.float32, torch.device("cpu"), False)
    deferred = DeferredKV(3, drafts, 32, saved, Counters())
    both = np.array([0, 1])
    batch = SimpleNamespace(
        idx_mapping_np=both,
        num_scheduled_tokens=np.array([3, 3]),
        num_draft_tokens_per_req=np.array([drafts, drafts]),
        is_prefilling_np=np.zeros(2, dtype=bool),
        num_tokens_after_padding=6,
    )
    for exit in (0, 1):
        deferred.note_drafted(both, np.array([True, True]), 0)
        deferred.note_drafted(both[:1], np.array([True]), exit)
        deferred.begin_step(batch)
        assert deferred.deep == (exit == 0)
    assert deferred.state_rows[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_exits_have_graphs_while_memory_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: Any = object.__new__(DeferredKVSpeculator)
    made.cut = SimpleNamespace(exit_layers=(2, 4, 6), exit=0)
    made.deferred = SimpleNamespace(exit=0)
    graphs = GraphsByExit(lambda: made.cut.exit)
    free = [150]

    def capture(self: Any) -> None:
        graphs["size"] = f"graph {made.deferred.exit}"
        free[0] -= 40

    monkeypatch.setattr(Speculator, "capture", capture)
    monkeypatch.setattr(speculator, "free_memory", lambda: free[0])
    made.capture()
    assert made.cut.exit == made.deferred.exit == 0
    for exit, captured in enumerate((True, True, False)):
        made.read_at(exit)
        assert ("size" in graphs) == captured
        if captured:
            assert graphs["size"] == f"graph {exit}"
