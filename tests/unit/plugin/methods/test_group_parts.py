# SPDX-License-Identifier: Apache-2.0
"""A worker group's parts: room for candidates, and states that are sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configured import from_flags
from conftest import Factory
from vllm.sequence import IntermediateTensors

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates
from vllm_ppd.vllm_plugins.methods.group.first_stage import FirstStage
from vllm_ppd.vllm_plugins.methods.group.stage import GroupStep

GROUP = "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 3"


def test_room_for_candidates_is_checked_before_a_model_loads(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{GROUP} --max-num-seqs"
    # A CPU's backend has no buffers of a row a candidate
    from_flags(tiny_model(), f"{flags} 16")
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    monkeypatch.setattr(platform, "has_triton", lambda: True)
    from_flags(tiny_model(), f"{flags} 24")
    for most, message in (
        (16, "8 requests need --max-num-seqs 24, not 16; raise it"),
        (4, "4 requests need --max-num-seqs 12, not 4"),
    ):
        with pytest.raises(OptionError, match=f"candidates=3 for {message}"):
            from_flags(tiny_model(), f"{flags} {most}")


@pytest.mark.parametrize("graphs", [False, True])
def test_states_under_way_are_not_in_a_graphs_memory(graphs: bool) -> None:
    """vLLM waits for its sends in the next step; the micro-steps run the same CUDA graphs again."""
    stage: Any = object.__new__(FirstStage)
    stage.cut = SimpleNamespace(
        graph_buffers=(torch.zeros(2, 4), None) if graphs else None
    )
    cpu = torch.device("cpu")
    stage.runner = SimpleNamespace(device=cpu)
    stage.states = SavedStates(
        2,
        4,
        torch.float32,
        cpu,
        has_residual=True,
    )
    stage.carried = np.zeros(2)
    stage.step = GroupStep(
        ["a", "b"],
        np.arange(2),
        np.arange(2),
        np.arange(2),
    )
    memory = IntermediateTensors(
        {"hidden_states": torch.ones(3, 4), "residual": torch.ones(3, 4)}
    )
    sent = stage.end_forward(memory)
    for name, states in memory.tensors.items():
        assert (sent[name].data_ptr() == states.data_ptr()) != graphs
        states.zero_()
        assert bool(sent[name].all()) == graphs
    assert all(bool(kept.all()) for kept in stage.states.load(torch.arange(2)))
