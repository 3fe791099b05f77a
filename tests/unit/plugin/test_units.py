# SPDX-License-Identifier: Apache-2.0
"""Saved states, the draft planner, the acceptance watch and the per-request switch, without an engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, check_names, drafting_allowed
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.drafting.acceptance_watch import AcceptanceWatch
from vllm_ppd.vllm_plugins.drafting.planner import DraftPlanner, Plan
from vllm_ppd.vllm_plugins.engine.v1.batch import Batch
from vllm_ppd.vllm_plugins.methods.early.saved_states import SavedStates, flat_ranges


def test_flat_ranges() -> None:
    starts, lengths = np.array([10, 50, 7]), np.array([3, 1, 2])
    assert flat_ranges(starts, lengths).tolist() == [10, 11, 12, 50, 7, 8]
    assert flat_ranges(starts, np.array([1, 1, 1])).tolist() == [10, 50, 7]


# ---- saved states


@pytest.fixture
def saved() -> SavedStates:
    """Three requests, width 4 (n = 3): a has 4 rows from position 20, b 2 from 31, c 1 from 5."""
    states = SavedStates(4, 4, 8, torch.float32, torch.device("cpu"), has_residual=True)
    states.req_ids = ["a", "b", "c"]
    states.base_position[:3], states.count[:3] = (20, 31, 5), (4, 2, 1)
    states.tokens[0], states.tokens[1, :2], states.tokens[2, 0] = (1, 2, 3, 4), (5, 6), 7
    return states


def match(saved: SavedStates, req_ids: list[str], positions: list[int], lens: list[int], tokens: list[int]) -> Any:
    rows = saved.match(req_ids, np.array(positions), np.array(lens), np.array(tokens))
    return None if rows is None else rows.tolist()


def test_match_whole_and_prefix(saved: SavedStates) -> None:
    assert match(saved, ["a", "b", "c"], [20, 31, 5], [4, 2, 1], [1, 2, 3, 4, 5, 6, 7]) == [0, 1, 2, 3, 4, 5, 8]
    # A grammar trimmed a's drafts: a prefix of the states is enough.
    assert match(saved, ["a", "b", "c"], [20, 31, 5], [2, 1, 1], [1, 2, 5, 7]) == [0, 1, 4, 8]


def test_match_follows_requests_that_moved(saved: SavedStates) -> None:
    assert match(saved, ["c", "a"], [5, 20], [1, 2], [7, 1, 2]) == [8, 0, 1]


@pytest.mark.parametrize(
    ("req_ids", "positions", "lens", "tokens"),
    [
        (["a", "d"], [20, 3], [1, 1], [1, 9]),  # a request without states: a prefill joined
        (["a"], [19], [1], [1]),  # another position
        (["a"], [20], [2], [1, 9]),  # another token
        (["b"], [31], [3], [5, 6, 7]),  # more tokens than states
        (["a", "b", "c"], [0, 31, 5], [4, 2, 1], [1, 2, 3, 4, 5, 6, 7]),  # started over after preemption
    ],
)
def test_no_match_falls_back(
    saved: SavedStates, req_ids: list[str], positions: list[int], lens: list[int], tokens: list[int]
) -> None:
    assert match(saved, req_ids, positions, lens, tokens) is None


def test_cleared_states_never_match(saved: SavedStates) -> None:
    saved.clear()
    assert match(saved, ["a"], [20], [1], [1]) is None


def test_store_copies_and_keeps_the_level(saved: SavedStates) -> None:
    hidden, residual = torch.randn(2, 8), torch.randn(2, 8)
    expected = hidden.clone()
    saved.store(np.array([5, 9]), 2, hidden, residual)
    hidden.zero_()  # vLLM's norms overwrite their inputs
    got = saved.load(np.array([9, 5]))
    assert torch.equal(got[0], expected.flip(0))
    assert got[1] is not None
    assert torch.equal(got[1], residual.flip(0))
    assert (saved.level[1, 1], saved.level[2, 1]) == (2, 2)


# ---- planning


def planner(requests: list[dict[str, Any]], **options: Any) -> tuple[DraftPlanner, list[list[int]]]:
    """A planner over requests of {prompt, output, max_tokens, extra_args, emitted}."""
    lengths = [request["prompt"] + request.get("output", 1) for request in requests]
    batch = SimpleNamespace(  # of vLLM's InputBatch what the planner reads
        num_reqs=len(requests),
        req_ids=[f"r{i}" for i in range(len(requests))],
        num_tokens_no_spec=np.array(lengths, dtype=np.int32),
        num_prompt_tokens=np.array([request["prompt"] for request in requests], dtype=np.int32),
        token_ids_cpu=np.arange(len(requests) * 200, dtype=np.int32).reshape(len(requests), 200),
    )
    params = {
        f"r{i}": SimpleNamespace(
            sampling_params=SamplingParams(
                max_tokens=request.get("max_tokens", 50), extra_args=request.get("extra_args")
            )
        )
        for i, request in enumerate(requests)
    }
    config = DraftingConfig(exit_layer=(3,), num_layers=6, **options)
    emitted = [[1] * request.get("emitted", 1) for request in requests]
    runner = SimpleNamespace(input_batch=batch, requests=params, max_model_len=100)
    return DraftPlanner(config, Batch(runner)), emitted


def drafts_of(plan: Plan | None) -> dict[int, int] | None:
    return None if plan is None else dict(zip(plan.rows.tolist(), plan.max_drafts.tolist(), strict=True))


def test_plan_positions_and_tokens() -> None:
    made, emitted = planner([{"prompt": 10, "output": 3}, {"prompt": 20}])
    plan = made.plan(emitted)
    assert plan is not None
    assert plan.base_positions.tolist() == [12, 20]
    assert plan.base_tokens.tolist() == [12, 220]
    assert drafts_of(plan) == {0: 3, 1: 3}


def test_partial_prefill_and_finished_requests_do_not_run() -> None:
    requests = [{"prompt": 10, "emitted": 0}, {"prompt": 10, "output": 5, "max_tokens": 5}, {"prompt": 10}]
    made, emitted = planner(requests)
    assert drafts_of(made.plan(emitted)) == {2: 3}


def test_limits_shorten_the_draft() -> None:
    requests = [{"prompt": 10, "output": 5, "max_tokens": 5 + left} for left in (1, 2, 3, 4, 9)]
    made, emitted = planner(requests)
    # With one token left there is nothing to draft: the next step emits it.
    assert drafts_of(made.plan(emitted)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3}
    made, emitted = planner([{"prompt": 98 - left, "output": 1} for left in (0, 1, 2, 5)])
    assert drafts_of(made.plan(emitted)) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_soft_cut_off_counts_drafting_requests_only() -> None:
    requests = [
        {"prompt": 9, "extra_args": {"ppd_draft": 0}},
        {"prompt": 9},
        {"prompt": 9, "emitted": 0},
        {"prompt": 9},
        {"prompt": 9},
    ]
    made, emitted = planner(requests, max_drafting_requests=2)
    assert drafts_of(made.plan(emitted)) == {0: 0, 1: 3, 3: 3, 4: 0}


def test_rows_that_cannot_draft_leave_the_soft_cut_off_to_others() -> None:
    made, emitted = planner([{"prompt": 9}] * 4, max_drafting_requests=2)
    able = np.array([True, False, True, True])
    assert drafts_of(made.plan(emitted, able=able)) == {0: 3, 1: 0, 2: 3, 3: 0}
    assert made.plan(emitted, able=np.zeros(4, dtype=bool)) is None


def test_hard_cut_off() -> None:
    requests = [{"prompt": 9}] * 3
    assert drafts_of(planner(requests, disable_by_batch_size=3)[0].plan([[1]] * 3)) == {0: 3, 1: 3, 2: 3}
    assert planner(requests, disable_by_batch_size=2)[0].plan([[1]] * 3) is None


def test_nobody_drafts_means_no_shallow_work() -> None:
    made, emitted = planner([{"prompt": 9, "extra_args": {"ppd_draft": False}}])
    assert made.plan(emitted) is None


# ---- the per-request switch


@pytest.mark.parametrize(
    ("value", "expected"), [(0, False), (1, True), (False, False), (True, True), ("false", False), ("True", True)]
)
def test_switch_values(value: Any, expected: bool) -> None:
    assert drafting_allowed({"ppd_draft": value}) is expected


def test_switch_absent_and_bad() -> None:
    assert drafting_allowed(None)
    assert drafting_allowed({"other": 0})
    for bad in ("maybe", "", "0", 2, 0.5, 1.0, [0], [], None, {}, "x" * 10**6):
        with pytest.raises(ValueError, match=r"vllm_xargs\['ppd_draft'\].* is not a truth value; use true") as caught:
            drafting_allowed({"ppd_draft": bad})
        assert len(str(caught.value)) < 200


def test_back_off_of_a_request() -> None:
    for value in (0, 1, 0.25, 1.0):
        assert back_off_threshold({"ppd_eps_b": value}) == value
    for bad in (True, False, "0.5", [0.5], None, -0.1, 1.5, float("nan"), float("inf"), 10**400, "x" * 10**6):
        with pytest.raises(ValueError, match=r"vllm_xargs\['ppd_eps_b'\].* is not a number from 0 to 1") as caught:
            back_off_threshold({"ppd_eps_b": bad})
        assert len(str(caught.value)) < 200


def test_misspelt_request_options() -> None:
    check_names(None)
    check_names({"ppd_draft": 1, "ppd_eps_b": 1, "session_id": "a", "draft": 1, "kv_transfer_params": {}, 3: 4})
    for key, near in {
        "ppd_drafts": "ppd_draft", "PPD_DRAFT": "ppd_draft", "Ppd_Draft": "ppd_draft", "ppd-draft": "ppd_draft",
        "ppddraft": "ppd_draft", " ppd_draft": "ppd_draft", "pdd_draft": "ppd_draft", "ppd_eps": "ppd_eps_b",
        "PPD_EPS_B": "ppd_eps_b", "ppd_" + "eps_b" * 10**5: "ppd_eps_b", "ppd_zzz": "ppd_",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"vllm_xargs has no key .*; did you mean '{near}") as caught:
            check_names({key: False})
        assert len(str(caught.value)) < 200


# ---- acceptance


def test_watch_warns_once_and_again_after_recovery(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch()
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        for _ in range(999):
            watch.observe(3, 0)
        assert not caplog.messages
        for _ in range(2001):
            watch.observe(3, 0)
        assert len(caplog.messages) == 1
        assert "0 of 3000 drafted tokens were accepted over the last 1000 drafts" in caplog.messages[0]
        for _ in range(1000):
            watch.observe(3, 2)
        for _ in range(1000):
            watch.observe(3, 0)
        assert len(caplog.messages) == 2
