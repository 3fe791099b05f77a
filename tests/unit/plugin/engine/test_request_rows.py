# SPDX-License-Identifier: Apache-2.0
"""Rows that requests keep while vLLM's V1 batch moves, and what they ask of drafting."""

from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ppd.vllm_plugins.engine.requests import RequestOptions, RequestRows, Setting


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


def test_what_a_request_asks_for_is_in_its_row() -> None:
    options = RequestOptions(4, 3, 100, torch.device("cpu"))
    options.add(0, SamplingParams(temperature=0.6, top_p=0.9, top_k=7))
    options.add(1, SamplingParams(temperature=0.6, seed=5, extra_args={"ppd_draft": False, "ppd_eps_b": 0.25}))
    options.add(2, SamplingParams(temperature=0.0))
    options.add(3, None)  # a pooling request
    columns = [Setting.MAX_DRAFTS, Setting.TEMPERATURE, Setting.DRAFT_TEMPERATURE, Setting.TOP_K, Setting.TOP_P]
    expected = [[3, 0.6, 0.6, 7, 0.9], [0, 0.6, 0, 100, 1], [3, 0, 0, 100, 1], [3, 0, 0, 100, 1]]
    np.testing.assert_allclose(options.settings[:, columns], expected, rtol=1e-6)
    assert np.isnan(options.settings[[0, 2, 3], Setting.EPS_B]).all() and options.settings[1, Setting.EPS_B] == 0.25
    assert [options.sampling(np.array([row])).top_k is None for row in range(4)] == [False, True, True, True]


def test_steps_in_flight_read_options_as_they_were() -> None:
    """A row that has another request now keeps the former one's options on the device until those are applied."""
    options = RequestOptions(2, 3, 100, torch.device("cpu"))
    options.add(1, SamplingParams(temperature=0.5))
    options.apply()
    options.add(1, SamplingParams(temperature=2.0))
    assert options.on_device[1, Setting.TEMPERATURE] == 0.5
    options.apply()
    assert options.on_device[1, Setting.TEMPERATURE] == 2.0
