# SPDX-License-Identifier: Apache-2.0
"""Step costs: measured once when an engine has warmed up, kept, and all that the number of drafts depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import CASES, generate, greedy, prompts
from conftest import drafter_of, runner_of, start_engine
from test_bypass import ADAPTIVE, with_costs
from vllm import envs

from vllm_ppd.vllm_plugins.draft_length import measure
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, MeasuredCosts
from vllm_ppd.vllm_plugins.integration.v1 import warm_up
from vllm_ppd.vllm_plugins.integration.v1.dummy_steps import most_requests, time_steps

TABLE = CostTable(sizes=[1, 4], counts=[0, 1, 3], seconds=[[1.0, 1.1, 1.4], [1.2, 1.5, 2.1]])


def measured(seconds: Callable[[int, int], float], largest: int, delays: Sequence[float] = ()) -> tuple[CostTable, int]:
    """A table of steps that take so long, and the rounds that were run; each takes one of `delays` to run, in turn."""
    rounds: list[int] = []

    def run(requests: int, counts: Sequence[int]) -> list[float]:
        rounds.append(requests)
        time.sleep(delays[len(rounds) % len(delays)] if delays else 0.0)
        late = 10.0 if len(rounds) % 2 else 1.0
        return [late * seconds(requests, count) for count in counts]

    return measure.measure_table(run, largest, [0, 1, 3], lambda value: value), len(rounds)


def test_the_fastest_round_of_each_batch_size_counts() -> None:
    table, rounds = measured(lambda requests, drafts: requests + drafts, 20)
    assert (table.sizes, table.counts) == ([1, 4, 16, 20], [0, 1, 3])
    assert table.seconds == [[b, b + 1, b + 3] for b in table.sizes]
    assert rounds == 4 * measure.ROUNDS


def test_slow_steps_are_measured_in_few_rounds_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.01)
    table, rounds = measured(lambda requests, drafts: 1.0, 1024, [0.02])
    assert table.sizes == [1, 4, 16] and rounds == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"method": {"sizes": [1], "counts": [0, 1], "seconds": [[1.0]]}}'])
def test_a_damaged_file_is_none(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "costs" / "kept.json"
    assert warm_up.load(path) is None
    MeasuredCosts(method=TABLE).save(path)
    assert warm_up.load(path) == MeasuredCosts(method=TABLE) and list(path.parent.iterdir()) == [path]
    path.write_bytes(damage)
    assert warm_up.load(path) is None


@pytest.mark.parametrize(
    ("limits", "largest"),
    [
        ({}, 64),
        ({"max_model_len": 20}, 0),  # a request of a round is longer
        ({"num_blocks": 12}, 2),  # of 2 blocks in each of two groups, and vLLM's null block
        ({"max_num_batched_tokens": 48}, 12),
    ],
)
def test_the_largest_batch_that_can_be_timed(limits: dict[str, int], largest: int) -> None:
    sizes = {"max_model_len": 100, "num_blocks": 1000, "max_num_batched_tokens": 4096, **limits}
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    runner = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=sizes["max_num_batched_tokens"]),
        kv_cache_config=SimpleNamespace(num_blocks=sizes["num_blocks"], kv_cache_groups=[group, group]),
        max_model_len=sizes["max_model_len"],
    )
    assert most_requests(runner, [0, 1, 3]) == largest


def drafts_of(llm: Any, run: Callable[[Any], Any]) -> list[list[int]]:
    """Numbers of drafts of each request that are made while an engine serves, step by step."""
    drafter, made = drafter_of(llm), []
    draft = drafter.draft

    def noted(step: Any) -> list[list[int]]:
        drafts = draft(step)
        made.append([len(ids) for ids in drafts])
        return drafts

    drafter.draft = noted
    try:
        run(llm)
    finally:
        del drafter.draft
    return made


@pytest.mark.engine
def test_engines_with_the_same_table_make_the_same_drafts(
    engine: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path))  # vLLM may have cached the variable
    first, second = start_engine(tiny_model(), ADAPTIVE), engine(ADAPTIVE)
    # The first start has measured, and left no trace of it but a file.
    (path,) = (tmp_path / "vllm_ppd_step_costs").iterdir()
    kept = warm_up.load(path)
    assert kept is not None and kept.method.counts == [0, 1, 3] and kept.method.sizes == [1, 4, 16]
    drafter, runner = drafter_of(first), runner_of(first)
    assert not drafter.counters.values.any() and drafter.planner.forced is None
    assert not runner.requests and runner.input_batch.num_reqs == 0
    # Both take the table of a file that stands where the first has left it.
    MeasuredCosts(method=TABLE).save(path)
    monkeypatch.setattr(warm_up, "time_steps", None)
    for llm in (first, second):
        warm_up.set_draft_length(drafter_of(llm))
    cases = (CASES["more_than_fit"], CASES["arrivals_and_aborts"])
    for case in cases:
        made = [drafts_of(llm, case) for llm in (first, second)]
        assert made[0] == made[1]
        assert len({count for step in made[0] for count in step}) > 1
    # Another number of drafts is another file, and so is every measuring anew of the same one.
    monkeypatch.undo()
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path))  # vLLM may have cached the variable
    drafter.config = drafter.config.model_copy(update={"step_costs": "measure"})
    warm_up.set_draft_length(drafter)
    assert warm_up.load(path) not in (None, kept, MeasuredCosts(method=TABLE))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("method", "looked_up"), [("gamma", False), ("dynamo", False), ("cp", False), ("cp", True), ("dynamo", True)]
)
def test_timed_steps_verify_and_make_the_drafts_that_they_are_said_to(
    method: str, looked_up: bool, engine: Callable[..., Any], fitted_heads: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = {"gamma": {"method": "ppd", "gamma": 0.9, "num_speculative_tokens": 3}}
    llm = engine(options.get(method) or {"method": method, "model": fitted_heads(method), "adaptive": True})
    drafter, runner = drafter_of(llm), runner_of(llm)
    most = drafter.config.num_speculative_tokens
    counts, steps, execute = [0, 1, most], [], runner.execute_model

    def noted(output: Any, *args: Any) -> Any:
        drafts = output.scheduled_spec_decode_tokens
        steps.append([len(drafts.get(name, ())) for name in output.num_scheduled_tokens])
        return execute(output, *args)

    monkeypatch.setattr(runner, "execute_model", noted)
    drafter.draft_all(True)
    seconds = time_steps(drafter, looked_up, 3, counts)
    drafter.draft_all(False)
    assert len(seconds) == 3 and min(seconds) > 0
    decode = steps[1:-1]  # after the prompts, before the end
    timed = decode[1::2]
    assert timed == [[count] * 3 for count in (most, 1, 0)]
    monkeypatch.undo()
    assert not any("dummy" in name for name in runner.requests) and drafter.planner.forced is None
    requests = prompts(3, 20)
    assert generate(llm, requests, greedy(20)) == generate(engine(), requests, greedy(20))


@pytest.mark.engine
@pytest.mark.parametrize("share", [0.1, 0.35])
@pytest.mark.parametrize("case", ["more_than_fit", "structured_output"])
def test_same_tokens(share: float, case: str, engine: Callable[..., Any], alone: Callable[..., Any]) -> None:
    expected, llm = alone(case), engine(ADAPTIVE)
    with_costs(llm, share)
    assert CASES[case](llm) == expected
