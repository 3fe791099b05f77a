# SPDX-License-Identifier: Apache-2.0
"""Which steps take saved states, by the schedule alone, and whose states their tokens
take.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKV, SavedStates

NOBODY = 4 * 3


@pytest.fixture
def deferred() -> DeferredKV:
    """Four request rows, two drafts a request; rows 0 to 2 were drafted for."""
    device = torch.device("cpu")
    saved = SavedStates(15, 8, torch.float32, device, has_residual=True)
    states = DeferredKV(4, 2, max_tokens=16, saved=saved, counters=Counters())
    states.drafted[:3] = True
    return states


def scheduled(
    rows: list[int],
    tokens: list[int],
    drafts: list[int],
    prefilling: tuple[int, ...] = (),
) -> Any:
    """As much of vLLM's InputBatch as is read."""
    return SimpleNamespace(
        idx_mapping_np=np.array(rows),
        num_scheduled_tokens=np.array(tokens),
        num_draft_tokens_per_req=np.array(drafts),
        is_prefilling_np=np.isin(np.arange(len(rows)), prefilling),
        num_tokens_after_padding=sum(tokens) + 2,
    )


def test_requests_that_were_drafted_for_run_deep(deferred: DeferredKV) -> None:
    # A grammar trimmed the drafts of row 0, and row 1 moved to the batch's end.
    step = scheduled([0, 2, 1], [2, 3, 1], [1, 2, 0])
    deferred.begin_step(step, may_mix=True)
    assert deferred.mode == "deep"
    assert deferred.state_rows[:8].tolist() == [0, 1, 6, 7, 8, 3, NOBODY, NOBODY]
    deferred.end_step()
    # A state is good for a step.
    deferred.begin_step(step, may_mix=True)
    assert deferred.mode == "full"


@pytest.mark.parametrize(
    ("rows", "tokens", "prefilling"),
    [
        ([0, 3], [1, 1], ()),  # a request without states
        ([0, 1], [1, 5], ()),  # more tokens than the newest and its drafts
        ([0, 1], [1, 1], (1,)),  # a chunk of a prompt that is one token long
    ],
)
def test_others_join_by_the_first_stack(
    deferred: DeferredKV,
    rows: list[int],
    tokens: list[int],
    prefilling: tuple[int, ...],
) -> None:
    step = scheduled(rows, tokens, [0, 0], prefilling)
    for may_mix, mode in ((False, "full"), (True, "mixed")):
        deferred.drafted[:3] = True
        deferred.begin_step(step, may_mix)
        assert deferred.mode == mode

    def of_requests(
        batch: Any, requests: np.ndarray, index: torch.Tensor, *_: Any
    ) -> Any:
        assert batch is step and requests.tolist() == [1]
        assert index.tolist() == list(range(1, 1 + tokens[1]))
        return torch.full((len(index), 8), 7.0), torch.full((len(index), 8), 5.0)

    deferred.saved.hidden[0] = 3.0
    padded = step.num_tokens_after_padding
    hidden, residual = deferred.states(
        torch.zeros(padded),
        torch.arange(padded),
        SimpleNamespace(of_requests=of_requests),
    )
    assert residual is not None
    assert hidden[:, 0].tolist() == [3.0] + [7.0] * tokens[1] + [0.0] * 2
    assert residual[:, 0].tolist() == [0.0] + [5.0] * tokens[1] + [0.0] * 2
