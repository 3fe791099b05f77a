# SPDX-License-Identifier: Apache-2.0
"""A worker group's parts: room for candidates, where its requests stand, which steps it takes."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configured import from_flags
from conftest import Factory
from vllm import SamplingParams
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import SavedStates
from vllm_ppd.vllm_plugins.methods.group.first_stage import FirstStage
from vllm_ppd.vllm_plugins.methods.group.last_stage import LastStage
from vllm_ppd.vllm_plugins.methods.group.progress import CarriedStates, End, Progress
from vllm_ppd.vllm_plugins.methods.group.runner import GroupRunnerMixin
from vllm_ppd.vllm_plugins.methods.group.scheduler import PLACEHOLDER, GroupScheduler
from vllm_ppd.vllm_plugins.methods.group.stage import GroupStep

GROUP = "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 3"


def test_room_for_candidates_is_checked_before_and_after_vllm_chose_it(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = from_flags(tiny_model(), f"{GROUP} --max-num-seqs 24")
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    monkeypatch.setattr(platform, "runs_v2", lambda: True)
    with pytest.raises(OptionError, match="not 16; raise it"):
        from_flags(tiny_model(), f"{GROUP} --max-num-seqs 16")

    def started(self: Any, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.num_spec_tokens = 1
        self.max_num_running_reqs = 16

    monkeypatch.setattr(Scheduler, "__init__", started)
    scheduler: Any = GroupScheduler
    with pytest.raises(OptionError, match="not 16; raise it"):
        scheduler(vllm_config)


def progress_of(
    params: list[SamplingParams], prompts: list[int], allowance: list[int]
) -> Progress:
    """Requests whose prompt was just read, each with one token emitted; the model's
    length is 20.
    """
    ends = [
        End.of(SimpleNamespace(sampling_params=param, prompt_len=length), 20)
        for param, length in zip(params, prompts, strict=True)
    ]
    return Progress(np.array(prompts), np.array(allowance), ends)


def test_progress() -> None:
    """Stop tokens, a request's length and the model's end a request; its allowance only
    pauses it.
    """
    free = SamplingParams(max_tokens=50)
    stopping = SamplingParams(stop_token_ids=[9, 8], max_tokens=50)
    params = [SamplingParams(max_tokens=2), stopping, free, free]
    progress = progress_of(params, [5, 5, 18, 5], [4, 4, 4, 1])
    everyone = np.arange(4)
    assert progress.lengths.tolist() == [7, 20, 20, 20]
    # A token at position 6 is the first request's last; the third's at 19 is the
    # model's.
    assert progress.with_candidates(everyone).tolist() == [1, 3]
    assert progress.emit(everyone, np.array([8, 7, 7, 7])).tolist() == [
        False,
        True,
        False,
        True,
    ]
    progress.ready[[1, 3]] = True
    assert progress.sendable().tolist() == [1]
    assert progress.emit(np.array([1]), np.array([8])).tolist() == [False]
    assert progress.emitted.tolist() == [1, 2, 1, 1]
    assert progress.position.tolist() == [6, 7, 19, 6]
    progress.missed[3] = True
    assert not progress.waits_for_missed()  # it has emitted what it may


@pytest.mark.parametrize(
    ("settings", "decode", "room"),
    [
        ({}, True, 3),
        ({"extra_args": {"ppd_draft": False}}, True, 0),
        ({"repetition_penalty": 1.2}, True, 0),
        ({"logprobs": 0}, False, 0),
        ({"logprob_token_ids": [5]}, False, 0),
        ({"thinking_token_budget": 0}, False, 0),
    ],
)
def test_which_requests_are_given_placeholders(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], decode: bool, room: int
) -> None:
    """What a request asks for: whether its batch may go on in a step, and by how many
    tokens itself.
    """
    scheduler: Any = object.__new__(GroupScheduler)
    scheduler.placeholders = 3
    scheduler.most_requests = 8
    scheduler.running = []
    for name, options in (("free", {}), ("asked", settings)):
        request = Request(name, [1] * 5, SamplingParams(max_tokens=40, **options), None)
        request.append_output_token_ids([7, 7])
        request.num_computed_tokens = 6
        scheduler.running.append(request)
    scheduler.get_request_counts = lambda: (len(scheduler.running), 0)
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self: SchedulerOutput.make_empty()
    )
    scheduler.schedule()
    assert [len(request.spec_token_ids) for request in scheduler.running] == (
        [3, room] if decode else [0, 0]
    )


@pytest.mark.parametrize(
    ("drafts", "requests", "allowance"),
    [
        ([PLACEHOLDER] * 2, 2, [3, 1]),
        ([-1] * 2, 2, None),  # vLLM's padding
        ([PLACEHOLDER] * 2, 3, None),  # more than the cut-off
    ],
)
def test_group_steps(
    tiny_model: Factory, drafts: list[int], requests: int, allowance: list[int] | None
) -> None:
    """Only our scheduler's placeholders make a group step; else a request has its one token."""
    vllm_config = from_flags(tiny_model(), f"{GROUP} --ppd-disable-by-batch-size 2")
    stage: Any = LastStage(SimpleNamespace(vllm_config=vllm_config))
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {
        str(i): 1 + len(drafts) * (i == 0) for i in range(requests)
    }
    output.scheduled_spec_decode_tokens = {"0": drafts}
    taken = stage.begin_step(output)
    batch = SimpleNamespace(
        req_ids=list(output.num_scheduled_tokens),
        idx_mapping_np=np.arange(requests),
        num_computed_tokens_np=np.full(requests, 7, dtype=np.int32),
    )
    stage.begin_group_step(batch)
    assert (stage.step is None) == (allowance is None)
    assert allowance is None or stage.step.allowance.tolist() == allowance
    assert set(taken.num_scheduled_tokens.values()) == {1}
    assert taken.total_num_scheduled_tokens == requests
    assert taken.scheduled_spec_decode_tokens == {}


@pytest.mark.parametrize("graphs", [False, True])
def test_states_under_way_are_not_in_a_graphs_memory(graphs: bool) -> None:
    """vLLM waits for its sends in the next step; the micro-steps run the same CUDA graphs again."""
    stage: Any = object.__new__(FirstStage)
    stage.cut = SimpleNamespace(
        graph_buffers=(torch.zeros(2, 4), None) if graphs else None
    )
    saved = SavedStates(2, 4, torch.float32, torch.device("cpu"), True)
    stage.states = CarriedStates(saved)
    stage.step = GroupStep(["a", "b"], np.arange(2), np.arange(2), np.arange(2))
    memory = IntermediateTensors(
        {"hidden_states": torch.ones(3, 4), "residual": torch.ones(3, 4)}
    )
    sent = stage.end_forward(memory)
    for name, states in memory.tensors.items():
        assert (sent[name].data_ptr() == states.data_ptr()) != graphs
        states.zero_()
        assert bool(sent[name].all()) == graphs
    assert all(bool(kept.all()) for kept in stage.states.load(np.arange(2)))


def slot(*rows: int) -> Any:
    """Tokens received for some request rows, as vLLM keeps them."""
    return SimpleNamespace(idx_mapping_np=np.array(rows))


@pytest.mark.parametrize(
    ("queue", "scheduled", "left"),
    [
        ([slot(3), slot(0, 1)], ["a"], [slot(0, 1), None]),  # at once: of a group
        ([slot(0), slot(2, 3)], ["a"], [slot(0), slot(2, 3)]),  # in turns
        ([None, slot(1)], ["a", "new"], [None, slot(1)]),
        ([], ["a"], []),  # the last stage
    ],
)
def test_tokens_are_read_when_a_request_needs_them(
    queue: list[Any], scheduled: list[str], left: list[Any]
) -> None:
    """vLLM reads the first of two steps' tokens, when both stages work on other requests."""

    class VllmsRunner:
        def update_pp_decode_requests(self) -> None:
            self.pp_handler.queue.popleft()
            self.pp_handler.queue.append(None)

        def execute_model(self, scheduler_output: Any) -> list[Any]:
            return list(self.pp_handler.queue)

        pp_handler = SimpleNamespace(queue=deque(queue))
        req_states = SimpleNamespace(req_id_to_index={"a": 0, "b": 1})

    class Runner(GroupRunnerMixin, VllmsRunner):
        def __init__(self) -> None:
            stage: Any = SimpleNamespace(begin_step=lambda output: output, step=None)
            self.stage = stage

    runner: Any = Runner()
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1))
    seen = runner.execute_model(output)
    assert [slot and slot.idx_mapping_np.tolist() for slot in seen] == [
        slot and slot.idx_mapping_np.tolist() for slot in left
    ]
