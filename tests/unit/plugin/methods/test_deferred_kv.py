# SPDX-License-Identifier: Apache-2.0
"""Which steps take saved states, told from the schedule alone, and whose states their
tokens take.
"""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS, Counters
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import (
    DeferredKV,
    SavedStates,
    ScheduledStep,
)

CPU = torch.device("cpu")
NOBODY = 4 * 3


@pytest.fixture
def deferred() -> DeferredKV:
    """Four request rows, two drafts a request; rows 0 to 2 were drafted for."""
    saved = SavedStates((4 + 1) * 3, 8, torch.float32, CPU, has_residual=True)
    states = DeferredKV(
        rows=4, num_drafts=2, max_tokens=16, saved=saved, counters=Counters()
    )
    states.drafted[:3] = True
    return states


def scheduled(
    rows: list[int],
    tokens: list[int],
    drafts: list[int],
    prefilling: tuple[int, ...] = (),
) -> ScheduledStep:
    places = np.isin(np.arange(len(rows)), prefilling)
    return ScheduledStep(
        np.array(rows),
        np.array(tokens),
        np.array(drafts),
        places,
        padded=sum(tokens) + 2,
    )


def counted(deferred: DeferredKV) -> dict[str, float]:
    return {
        name: value
        for name, value in zip(COUNTERS, deferred.counters.values, strict=True)
        if value
    }


def test_requests_that_were_drafted_for_run_deep(deferred: DeferredKV) -> None:
    # A grammar trimmed the drafts of row 0, and row 1 moved to the batch's end.
    deferred.begin_step(scheduled([0, 2, 1], [2, 3, 1], [1, 2, 0]), may_mix=True)
    assert deferred.mode == "deep" and counted(deferred) == {"deferred_steps": 1}
    assert deferred.state_rows[:8].tolist() == [0, 1, 6, 7, 8, 3, NOBODY, NOBODY]
    deferred.end_step()
    # A state is good for a step.
    deferred.begin_step(scheduled([0, 2, 1], [2, 3, 1], [1, 2, 0]), may_mix=True)
    assert deferred.mode == "full"


@pytest.mark.parametrize(
    ("rows", "tokens", "drafts", "prefilling"),
    [
        ([0, 3], [1, 1], [0, 0], ()),  # a request without states
        ([0, 1], [1, 5], [0, 0], ()),  # more tokens than the newest and its drafts
        ([0, 1], [1, 1], [0, 0], (1,)),  # a chunk of a prompt that is one token long
        ([0, 1], [1, 4], [0, 3], ()),  # more drafts than there are states of
    ],
)
def test_others_join_by_the_first_stack(
    deferred: DeferredKV,
    rows: list[int],
    tokens: list[int],
    drafts: list[int],
    prefilling: tuple[int, ...],
) -> None:
    step = scheduled(rows, tokens, drafts, prefilling)
    for may_mix, mode in ((True, "mixed"), (False, "full")):
        deferred.drafted[:3] = True
        deferred.begin_step(step, may_mix)
        assert deferred.mode == mode
    deferred.drafted[:3] = True
    deferred.begin_step(step, may_mix=True)
    assert deferred.state_rows[: step.padded].tolist() == [0] + [NOBODY] * (
        tokens[1] + 2
    )

    class Passes:
        def of_requests(
            self,
            requests: np.ndarray,
            index: torch.Tensor,
            ids: torch.Tensor,
            at: torch.Tensor,
        ) -> Any:
            assert requests.tolist() == [1] and index.tolist() == list(
                range(1, 1 + tokens[1])
            )
            return torch.full((len(index), 8), 7.0), torch.full((len(index), 8), 5.0)

    deferred.saved.hidden[0] = 3.0
    hidden, residual = deferred.states(
        torch.zeros(step.padded), torch.arange(step.padded), Passes()
    )
    assert residual is not None
    assert hidden[:, 0].tolist() == [3.0] + [7.0] * tokens[1] + [0.0] * 2
    assert residual[:, 0].tolist() == [0.0] + [5.0] * tokens[1] + [0.0] * 2


def test_states_are_copies() -> None:
    states = SavedStates(12, 8, torch.float32, CPU, has_residual=True)
    hidden = torch.randn(2, 8)
    residual = torch.randn(2, 8)
    expected = hidden.clone(), residual.clone()
    states.store(torch.tensor([5, 9]), (hidden, residual))
    hidden.zero_()  # vLLM's norms overwrite their inputs
    loaded = states.load(torch.tensor([9, 5]))
    assert torch.equal(loaded[0], expected[0].flip(0)) and loaded[1] is not None
    assert torch.equal(loaded[1], expected[1].flip(0))
    assert SavedStates(12, 8, torch.float32, CPU, has_residual=False).residual is None
