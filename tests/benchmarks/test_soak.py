# SPDX-License-Identifier: Apache-2.0
"""The soak's checks take what is right and name what is wrong; its requests depend on nothing but their index."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.soak import checks, client, run
from vllm_ppd.benchmarks.soak.workload import CHUNK, Request, Workload
from vllm_ppd.heads.locking import InUse, writing_folder

MODEL = str(ROOT / "benchmarks/demo/model")
COUNTERS = {
    "vllm:generation_tokens_total": 12, "vllm:request_success_total": 3, checks.DRAFTS: 2, checks.DRAFTED: 6,
    checks.ACCEPTED: 4, checks.BY_POSITION: 4, checks.PREEMPTIONS: 1, "vllm:num_requests_running": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def request_of() -> Callable[[int], Request]:
    return Workload(MODEL).request


def answer(index: int, ids: list[int], **changes: Any) -> checks.Record:
    plain = {"text": "".join(map(chr, ids)), "finish": "length", "hung_up": False, "life": 1.0}
    return {"index": index, "ids": ids, **plain, **changes}


def body(index: int, **settings: Any) -> Request:
    return Request(index, {"prompt": [5, 6], "temperature": 0, "max_tokens": 8, **settings})


def soaked(counters: dict[str, float] | None = None, **changes: Any) -> checks.Kept:
    """Two answers, one of which the client did not read to its end, and the end of their server."""
    answers = {0: answer(0, [70] * 6), 1: answer(1, [71] * 3, finish=None, hung_up=True)}
    end = {"life": 1.0, "memory": 1, "code": 0, "processes": [], "shared_memory": []}
    return checks.Kept(2, answers, [], {**end, "counters": {**COUNTERS, **(counters or {})}, **changes})


def test_requests_depend_on_their_index_alone(request_of: Callable[[int], Request]) -> None:
    again = Workload(MODEL)
    asked = [request_of(index) for index in range(2000)]
    assert [again.request(one.index) for one in reversed(asked)] == asked[::-1]
    share = partial(lambda which: sum(map(which, asked)) / len(asked))
    assert 0.12 < share(lambda one: one.hang_up is not None) < 0.18
    assert 0.4 < share(lambda one: one.greedy) < 0.6
    assert 0.03 < share(lambda one: "structured_outputs" in one.body) < 0.07
    for one in asked:
        assert one.seeded <= (len(one.body["prompt"]) + one.body["max_tokens"] < CHUNK)
        assert one.body["min_tokens"] <= one.body["max_tokens"] if "min_tokens" in one.body else True
        if one.repeats is not None:
            original = request_of(one.repeats)
            assert original.seeded and original.hang_up is None and original.body == one.body


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"ids": [1, 2, 4]}, True),
        ({"ids": [1, 2, 3, 4]}, True),
        ({"text": "other"}, True),
        ({"finish": "stop"}, True),
        ({"ids": [1, 2], "text": "", "finish": None, "hung_up": True}, False),
        ({"ids": [], "text": "", "finish": None, "hung_up": True}, False),
        ({"ids": [1, 3], "text": "", "finish": None, "hung_up": True}, True),
    ],
)
def test_answers_differ_in_tokens_text_or_end(change: dict[str, Any], differs: bool) -> None:
    one, other = answer(0, [1, 2, 3]), answer(0, [1, 2, 3]) | change
    assert checks.unlike(one, other) is checks.unlike(other, one) is differs
    assert checks.compare([(0, 0), (0, None), (1, 0), (0, 1)], {0: one}, {0: other}) == (1, [0] if differs else [])


@pytest.mark.parametrize(
    ("counters", "fault"),
    [
        ({}, None),
        ({"vllm:generation_tokens_total": 10}, "10 tokens generated, 11 received, 5 more at most"),
        ({"vllm:generation_tokens_total": 17}, "17 tokens generated, 11 received, 5 more at most"),
        ({"vllm:request_success_total": 1}, "1 requests answered, 2 of 3 read"),
        ({"vllm:request_success_total": 4}, "4 requests answered, 2 of 3 read"),
        ({checks.ACCEPTED: 7, checks.BY_POSITION: 7}, "7 of 6 drafted tokens accepted"),
        ({checks.BY_POSITION: 3}, "4 tokens accepted, 3 by position"),
        ({checks.DRAFTED: 7}, "2 drafts of 3 tokens at most, 7 in all"),
        ({"ppd:group_candidates_total": 5, "ppd:group_hits_total": 1}, "5 candidates, 1 hits, 0 discarded"),
        ({"vllm:num_requests_running": 1}, "vllm:num_requests_running is 1, not 0"),
        ({"vllm:kv_cache_usage_perc": 0.25}, "vllm:kv_cache_usage_perc is 0.25, not 0"),
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


def sampled(mib: Callable[[int], float], lives: Callable[[int], float] = lambda answered: 1.0) -> checks.Kept:
    """Samples of a server that answers 2000 requests."""
    samples = [
        {"life": lives(n), "answered": n, "memory": mib(n) * checks.MIB, "counters": {}} for n in range(0, 2001, 100)
    ]
    return checks.Kept(2000, {}, samples, {"life": samples[-1]["life"]})


def test_memory_may_grow_as_the_controls_and_its_noise() -> None:
    control = checks.growth(sampled(lambda n: 400 + n % 200 / 100))
    assert control == (0.0, 1.0)
    at_first = checks.growth(sampled(lambda n: 400 + min(n, 1000)))
    leaking = checks.growth(sampled(lambda n: 400 + n / 100))
    assert checks.memory_faults(at_first, control) == []
    (fault,) = checks.memory_faults(leaking, control)
    assert fault == "memory grew by 6.0 MiB, the control's by 0.0 (its samples differ by 1.0)"
    for begun, known in ((800, True), (900, False)):
        grown = checks.growth(sampled(lambda n: 400, lambda n, begun=begun: float(n > begun)))
        assert (grown is not None) is known
        assert (checks.memory_faults(grown, control) == []) is known


def test_records_are_read_again(tmp_path: Path) -> None:
    """The newest answer counts, a line that was cut off does not, and counters are those of all servers together."""
    path = tmp_path / "cp.jsonl"
    sample = {"memory": 9, "answered": 1}
    lines = [
        answer(0, [1]), {**sample, "life": 1.0, "counters": {checks.PREEMPTIONS: 2}}, answer(0, [2]), answer(7, [3]),
        {**sample, "life": 2.0, "counters": {checks.PREEMPTIONS: 3}},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"index": 1, "ids": [')
    kept = checks.read(path, 2)
    assert {index: one["ids"] for index, one in kept.answers.items()} == {0: [2]}
    assert not kept.complete and len(kept.samples) == 2
    with path.open("a") as file:
        file.writelines("\n" + json.dumps(line) for line in (
            answer(1, [1]), {**soaked().end, "life": 2.0, "counters": {checks.PREEMPTIONS: 4}}
        ))  # fmt: skip
    assert checks.read(path, 2).complete and not checks.read(path, 3).complete
    assert checks.read(path, 2).total(checks.PREEMPTIONS) == 6
    assert not checks.read(tmp_path / "none", 1).complete


def test_every_fault_of_a_server_is_in_its_row() -> None:
    method = run.Method(run.Contender("cp"), drafts=3)
    control, right = soaked(), soaked()
    wrong = soaked({checks.ACCEPTED: 0, checks.BY_POSITION: 0, checks.PREEMPTIONS: 0})
    wrong.answers[0] |= {"ids": [70] * 5 + [71], "error": "HTTP 500"}
    row, faults = run.row_of(method, right, control, body)
    assert row["greedy unlike vLLM"] == "0 of 2" and row["accepted"] == 4 and row["hung up"] == 1
    assert faults == []
    row, faults = run.row_of(method, wrong, control, body)
    assert row["greedy unlike vLLM"] == "1 of 2" and row["faults"] == len(faults) == 4
    assert (
        faults[0] == "request 0: HTTP 500"
        and "no draft was accepted" in faults
        and "no request was preempted" in faults
    )
    assert faults[1].startswith("request 0, greedy: after 5 tokens 71 (-") and "the top two are" in faults[1]


def test_a_soak_without_what_it_is_for_is_a_fault() -> None:
    method = next(method for method in run.methods() if method.contender.name == "cp + lookup")
    assert run.row_of(method, soaked(), soaked(), body)[1] == ["no draft was looked up"]
    assert run.row_of(method, soaked({"ppd:lookup_steps_total": 1}), soaked(), body)[1] == []


def test_two_soaks_of_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--folder", str(tmp_path)])
    with writing_folder(tmp_path), pytest.raises(InUse, match="being written by"):
        run.main()
