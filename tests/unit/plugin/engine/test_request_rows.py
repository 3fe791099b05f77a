# SPDX-License-Identifier: Apache-2.0
"""Rows that requests keep while vLLM's V1 batch moves."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ppd.vllm_plugins.engine.requests import RequestRows


def step(new: str = "", resumed: str = "", finished: str = "", preempted: str = "") -> SchedulerOutput:
    """A step of requests that are named by letters."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]  # type: ignore[misc]
    output.scheduled_cached_reqs.resumed_req_ids = set(resumed)
    output.finished_req_ids, output.preempted_req_ids = set(finished), set(preempted)
    return output


def test_a_request_keeps_its_row_until_it_ends_or_is_preempted() -> None:
    rows = RequestRows(3)
    assert rows.begin_step(step(new="abc")) == ["a", "b", "c"]
    assert rows.of("abc").tolist() == [0, 1, 2]
    assert rows.begin_step(step(finished="b")) == []
    assert rows.of("ca").tolist() == [2, 0]
    assert rows.begin_step(step(new="d", preempted="a")) == ["d"]
    assert sorted(rows.of("cd").tolist())[1] == 2 and rows.names[rows.of("d")[0]] == "d"
    assert rows.begin_step(step(resumed="a")) == ["a"]
    assert sorted(rows.of("acd").tolist()) == [0, 1, 2] == sorted(map(rows.names.index, "acd"))


def test_a_request_may_end_and_another_bear_its_name_in_a_step() -> None:
    rows = RequestRows(2)
    rows.begin_step(step(new="ab"))
    assert rows.begin_step(step(new="a", finished="a")) == ["a"]
    # The prefix cache was reset while the request ran.
    assert rows.begin_step(step(resumed="b", preempted="b")) == ["b"]
    assert sorted(rows.of("ab").tolist()) == [0, 1]
