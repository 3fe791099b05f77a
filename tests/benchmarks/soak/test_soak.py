# SPDX-License-Identifier: Apache-2.0
"""The soak's checks take what is right and name what is wrong; its requests depend on nothing but their index."""

import json
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.soak import checks, client, run
from vllm_ppd.benchmarks.soak.workload import CHUNK, Request, Workload

MODEL = str(ROOT / "benchmarks/demo/model")
COUNTERS = {
    "vllm:generation_tokens_total": 12, "vllm:request_success_total": 3, checks.DRAFTS: 2, checks.DRAFTED: 6,
    checks.ACCEPTED: 4, checks.BY_POSITION: 4, checks.PREEMPTIONS: 1, "vllm:num_requests_running": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def request_of() -> Callable[[int], Request]:
    return Workload(MODEL).request


def answer(index: int, ids: list[int], **changes: Any) -> checks.Record:
    plain = {"text": "".join(map(chr, ids)), "finish": "length", "hung_up": False}
    return {"index": index, "ids": ids, **plain, **changes}


def body(index: int, **settings: Any) -> Request:
    return Request(index, {"prompt": [5, 6], "temperature": 0, "max_tokens": 8, **settings})


def soaked(counters: dict[str, float] | None = None, **changes: Any) -> checks.Records:
    """Two answers, one of which the client did not read to its end, and the end of their server."""
    answers = {0: answer(0, [70] * 6), 1: answer(1, [71] * 3, finish=None, hung_up=True)}
    end = {"memory": 1, "code": 0, "processes": [], "shared_memory": []}
    return checks.Records(answers, [], {**end, "counters": {**COUNTERS, **(counters or {})}, **changes})


def test_requests_depend_on_their_index_alone(request_of: Callable[[int], Request]) -> None:
    again = Workload(MODEL)
    asked = [request_of(index) for index in range(2000)]
    assert [again.request(request.index) for request in reversed(asked)] == asked[::-1]
    assert 0.12 < sum(request.hang_up is not None for request in asked) / 2000 < 0.18
    assert 0.4 < sum(request.greedy for request in asked) / 2000 < 0.6
    assert 0.03 < sum("structured_outputs" in request.body for request in asked) / 2000 < 0.07
    for request in asked:
        assert request.seeded <= (len(request.body["prompt"]) + request.body["max_tokens"] < CHUNK)
        assert request.body.get("min_tokens", 0) <= request.body["max_tokens"]
        if request.repeats is not None:
            original = request_of(request.repeats)
            assert original.seeded and original.hang_up is None and original.body == request.body


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"ids": [1, 2, 4]}, True),
        ({"text": "other"}, True),
        ({"ids": [1, 2], "text": "", "finish": None, "hung_up": True}, False),
        ({"ids": [1, 3], "text": "", "finish": None, "hung_up": True}, True),
    ],
)
def test_answers_differ_in_tokens_text_or_end(change: dict[str, Any], differs: bool) -> None:
    mine, other = answer(0, [1, 2, 3]), answer(0, [1, 2, 3]) | change
    assert checks.differ(mine, other) is checks.differ(other, mine) is differs
    assert checks.compare([(0, 0), (0, None), (1, 0), (0, 1)], {0: mine}, {0: other}) == (1, [0] if differs else [])


@pytest.mark.parametrize(
    ("counters", "fault"),
    [
        ({}, None),
        ({"vllm:generation_tokens_total": 10}, "10 tokens generated, 11 received, 5 more at most"),
        ({"vllm:request_success_total": 1}, "1 requests answered, 2 of 3 read"),
        ({checks.ACCEPTED: 7, checks.BY_POSITION: 7}, "7 of 6 drafted tokens accepted"),
        ({checks.DRAFTED: 7}, "2 drafts of 3 tokens at most, 7 in all"),
        ({"ppd:group_candidates_total": 5, "ppd:group_hits_total": 1}, "5 candidates, 1 hits, 0 discarded"),
        ({"ppd:invalid_drafts_total": 2}, "ppd:invalid_drafts_total is 2, not 0"),
    ],
)
def test_counters_that_do_not_add_up_are_named(counters: dict[str, float], fault: str | None) -> None:
    assert checks.counter_faults(soaked(counters), body, drafts=3) == ([] if fault is None else [fault])


def test_what_a_server_leaves_is_named() -> None:
    assert checks.end_faults(soaked().end) == []
    end = soaked(code=-9, processes=["7 worker"], shared_memory=["psm_1"]).end
    assert checks.end_faults(end) == ["left processes: 7 worker", "left shared_memory: psm_1", "exit code -9"]


def test_shared_memory_is_left_once_no_process_maps_it() -> None:
    block = SharedMemory(create=True, size=64)
    try:
        assert block.name not in client.shared_memory()
        block.close()
        assert block.name in client.shared_memory()
    finally:
        block.unlink()
    assert block.name not in client.shared_memory()


def sampled(mib: Callable[[int], float]) -> checks.Records:
    """Samples of a server that answers 2000 requests."""
    samples = [{"answered": n, "memory": mib(n) * checks.MIB} for n in range(0, 2001, 100)]
    return checks.Records({n: answer(n, []) for n in range(2000)}, samples, {})


def test_memory_may_grow_as_the_controls_and_its_noise() -> None:
    control = checks.growth(sampled(lambda n: 400 + n % 200 / 100))
    assert control == (0.0, 1.0)
    at_first = checks.growth(sampled(lambda n: 400 + min(n, 1000)))
    leaking = checks.growth(sampled(lambda n: 400 + n / 100))
    assert checks.memory_faults(at_first, control) == []
    (fault,) = checks.memory_faults(leaking, control)
    assert fault == "memory grew by 6.0 MiB, the control's by 0.0 (its samples differ by 1.0)"


def test_a_server_that_was_stopped_is_asked_again(tmp_path: Path) -> None:
    """A line that was cut off does not count; complete is what has all answers and an end."""
    soak = run.Soak(tmp_path, 2)
    method = run.Method(run.Contender("cp"))
    path = soak.file_of(method)
    assert soak.records(method) is None
    lines = [answer(0, [1]), {"memory": 9, "answered": 1}, answer(1, [2]), soaked().end]
    for count, whole in ((2, False), (3, False), (4, True)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[:count]) + '{"index": 2, "ids": [')
        assert (soak.records(method) is not None) is whole
    records = checks.read(path)
    assert {index: record["ids"] for index, record in records.answers.items()} == {0: [1], 1: [2]}
    assert len(records.samples) == 1 and records.total(checks.PREEMPTIONS) == 1
    assert run.Soak(tmp_path, 3).records(method) is None


def test_every_fault_of_a_server_is_in_its_row() -> None:
    method = run.Method(run.Contender("cp"), drafts=3)
    control, right = soaked(), soaked()
    wrong = soaked({checks.ACCEPTED: 0, checks.BY_POSITION: 0, checks.PREEMPTIONS: 0})
    wrong.answers[0] |= {"ids": [70] * 5 + [71], "error": "HTTP 500"}
    row, faults = run.row_of(method, right, control, control, control, body)
    assert row["greedy unlike vLLM"] == "0 of 2" and row["accepted"] == 4 and row["hung up"] == 1
    assert faults == []
    row, faults = run.row_of(method, wrong, control, control, control, body)
    assert row["greedy unlike vLLM"] == "1 of 2" and row["faults"] == len(faults) == 4
    assert (
        faults[0] == "request 0: HTTP 500"
        and "no draft was accepted" in faults
        and "no request was preempted" in faults
    )
    assert faults[1].startswith("request 0, greedy: after 5 tokens 71 (-") and "the top two are" in faults[1]
    method = next(method for method in run.methods() if method.contender.name == "cp + lookup")
    assert run.row_of(method, soaked(), soaked(), soaked(), soaked(), body)[1] == ["no draft was looked up"]
