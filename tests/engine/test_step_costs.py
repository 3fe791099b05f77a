# SPDX-License-Identifier: Apache-2.0
"""Step costs: measured once when an engine has warmed up, kept, and all that the number
of drafts depends on.
"""

import importlib.metadata
import shutil
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, generate, greedy, prompts
from configured import drafting as drafting_config
from configured import from_dict
from conftest import (
    Factory,
    drafter_of,
    full_but,
    results_of,
    runner_of,
    scheduler_of,
    start_engine,
)
from methods import METHODS
from safetensors.torch import load_file, save_file
from vllm import envs

from vllm_ppd.vllm_plugins.draft_length import measure
from vllm_ppd.vllm_plugins.draft_length.costs import (
    NO_DRAFTS,
    CostTable,
    Plan,
    StepCosts,
)
from vllm_ppd.vllm_plugins.engine import step_costs
from vllm_ppd.vllm_plugins.engine.dummy_steps import (
    STEPS,
    most_requests,
    time_steps,
)

# What steps take when served does not count
ADAPTIVE = {"method": "early", "exit_layer": 3, "adaptive": "table"}

SECONDS = [[1.0, 1.1, 1.4], [1.2, 1.5, 2.1]]
TABLE = CostTable(sizes=[1, 4], counts=[0, 1, 3], seconds=SECONDS)


def test_the_fastest_round_of_each_batch_size_counts() -> None:
    """Every other round is late."""
    rounds: list[int] = []

    def run(requests: int, plans: Sequence[Plan]) -> list[float]:
        rounds.append(requests)
        late = 10.0 if len(rounds) % 2 else 1.0
        return [late * (requests + plan.drafts) for plan in plans]

    table = measure.measure_table(run, 20, [0, 1, 3], lambda value: value)
    assert (table.sizes, table.counts) == ([1, 16, 20], [0, 1, 3])
    assert table.seconds == [[b, b + 1, b + 3] for b in table.sizes]
    assert len(rounds) == 3 * measure.ROUNDS


def test_a_batch_whose_steps_would_take_minutes_is_replaced_by_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def run(requests: int, plans: Sequence[Plan]) -> list[float]:
        nonlocal now
        seconds = [0.03 * requests * (1 + plan.drafts) for plan in plans]
        now += sum(seconds)
        return seconds

    monkeypatch.setattr(
        measure, "time", types.SimpleNamespace(perf_counter=lambda: now)
    )
    table = measure.measure_table(
        run,
        256,
        [0, 1, 3],
        lambda value: value,
    )
    assert now <= measure.SECONDS
    assert table.sizes == [1, 16]
    costs = StepCosts(table)
    plain = costs.seconds(256, 0, NO_DRAFTS)
    assert costs.seconds(256, 0, Plan(3)) == pytest.approx(4 * plain)


@pytest.mark.parametrize("busy", [0, 1])
def test_ranks_run_the_same_steps_whichever_of_them_is_on_a_busy_core(
    busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.2)
    values: list[Any] = []

    def steps(
        rank: int, from_first_rank: Callable[[Any], Any]
    ) -> tuple[list[int], CostTable]:
        ran: list[int] = []

        def run(requests: int, plans: Sequence[Plan]) -> list[float]:
            ran.append(requests)
            time.sleep(0.02 * (rank == busy))
            return [
                (1.0 + (rank == busy) * len(ran)) * (1 + plan.drafts)
                for plan in plans
            ]

        return ran, measure.measure_table(
            run,
            64,
            [0, 1, 3],
            from_first_rank,
        )

    def noted(value: Any) -> Any:
        values.append(value)
        return value

    first = steps(0, noted)
    sent = iter(values)
    assert steps(1, lambda _: next(sent)) == first and not list(sent)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b'{"sizes": [1], "counts": [0, 1], "seconds": [[1.0]]}',
        b'{"sizes": [1], "counts": [0], "seconds": [[-1.0]]}',
    ],
)
def test_a_damaged_file_is_none(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "costs" / "kept.json"
    assert step_costs.load(path) is None
    TABLE.save(path)
    assert step_costs.load(path) == TABLE
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(damage)
    assert step_costs.load(path) is None


def kept_in(model: Path, options: dict[str, Any]) -> Path:
    """The file of an engine's step costs."""
    vllm_config = from_dict(model, options)
    return step_costs.cache_file(drafting_config(vllm_config), vllm_config)


def test_options_that_change_no_step_share_a_file(tiny_model: Factory) -> None:
    """So a start that measures replaces the file that later starts read."""
    files = [
        kept_in(tiny_model(), {"method": "early", "exit_layer": 3, **options})
        for options in (
            {},
            {"step_costs": "measure"},
            {"adaptive": False},
            {"exit_layer": 4},
        )
    ]
    assert files[0] == files[1] == files[2] != files[3]


def test_new_heads_in_the_same_folder_and_another_version_have_their_own_file(
    tiny_model: Factory,
    whole_heads: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = tmp_path / "heads"
    shutil.copytree(whole_heads("cp"), heads)

    options = {"method": "cp", "model": str(heads)}
    first = kept_in(tiny_model(), options)
    assert kept_in(tiny_model(), options) == first
    weights = load_file(heads / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()},
        heads / "model.safetensors",
    )
    retrained = kept_in(tiny_model(), options)
    assert retrained != first
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "9.9.9",
    )
    assert kept_in(tiny_model(), options) != retrained


# ---- engines


@pytest.mark.engine
@pytest.mark.parametrize(
    ("owner", "name", "value", "largest"),
    [
        ("scheduler_config", "max_num_seqs", 16, 16),
        ("", "max_model_len", 20, 0),  # a request of a round is longer
        (
            "kv_cache_config",
            "num_blocks",
            6,
            5,
        ),  # vLLM's null block is not usable
        ("scheduler_config", "max_num_batched_tokens", 48, 12),
    ],
)
def test_the_largest_batch_that_can_be_timed(
    engine: Factory,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    value: int,
    largest: int,
) -> None:
    runner = runner_of(engine({**ADAPTIVE, "adaptive": False}))
    monkeypatch.setattr(getattr(runner, owner) if owner else runner, name, value)
    assert most_requests(runner, [NO_DRAFTS, Plan(3)]) == largest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of step costs."""
    # vLLM may have cached the variable
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "vllm_ppd_step_costs"


def choices_of(llm: Any) -> list[int]:
    """Numbers of drafts that the scheduler chooses while an engine serves, step by step."""
    scheduler = scheduler_of(llm)
    with results_of(scheduler, "_choose", lambda _: scheduler.drafts) as choices:
        for case in ("more_than_fit", "arrivals_and_aborts"):
            CASES[case](llm)
    return choices


@pytest.mark.engine
@pytest.mark.parametrize("asynchronous", full_but({True}, [False, True]))
def test_engines_with_the_same_table_make_the_same_drafts(
    tiny_model: Factory,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    """Whatever their steps take: a choice reads acceptance and the table."""
    first = start_engine(tiny_model(), ADAPTIVE, async_scheduling=asynchronous)
    # The first start has measured, and left no trace of it but a file.
    (path,) = cache.iterdir()
    kept = step_costs.load(path)
    assert kept is not None
    assert (kept.counts, kept.sizes[0]) == ([0, 1, 3], 1)
    assert (
        not drafter_of(first).counters.values.any()
        and not runner_of(first).req_states.req_id_to_index
    )
    # Both take the table of a file that stands where the first has left it.
    dear = [[1.0, 1.25, 1.3], [1.0, 1.35, 1.4]]
    table = CostTable(sizes=[1, 4], counts=[0, 1, 3], seconds=dear)
    table.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(
            step_costs, "time_steps", lambda *args: pytest.fail("measured anew")
        )
        second = start_engine(
            tiny_model(), ADAPTIVE, async_scheduling=asynchronous
        )
        (table,) = first.collective_rpc("step_costs")
        scheduler_of(first).follow(table)
    choices = [choices_of(llm) for llm in (first, second)]
    assert choices[0] == choices[1] and len(set(choices[0])) > 1
    # Measuring anew replaces the file, and changes no random number.
    random = np.random.get_state()[1].tolist()  # noqa: NPY002
    config = drafter_of(first).config
    measured = config.model_copy(update={"step_costs": "measure"})
    monkeypatch.setattr(drafter_of(first), "config", measured)
    first.collective_rpc("step_costs")
    assert np.random.get_state()[1].tolist() == random  # noqa: NPY002
    assert list(cache.iterdir()) == [path] and step_costs.load(path) not in (
        None,
        kept,
        table,
    )


@pytest.mark.engine
@pytest.mark.parametrize("name", METHODS)
def test_timed_steps_verify_and_make_the_drafts_that_they_are_said_to(
    name: str, engine: Factory, drafting: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting(METHODS[name])
    runner = runner_of(llm)
    steps = []
    counts = [0, drafter_of(llm).config.num_speculative_tokens]
    execute = runner.execute_model

    def noted(output: Any, *args: Any) -> Any:
        drafts = output.scheduled_spec_decode_tokens
        steps.append(
            [len(drafts.get(name, ())) for name in output.num_scheduled_tokens]
        )
        return execute(output, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute_model", noted)
        seconds = time_steps(runner, 3, [Plan(count) for count in counts])
    assert len(seconds) == 2 and min(seconds) > 0
    # After the prompts, before the end.
    assert steps[1:-1] == [
        [count] * 3 for count in counts[::-1] for _ in range(STEPS)
    ]
    assert not any("dummy" in name for name in runner.req_states.req_id_to_index)
    requests = prompts(3, 20)
    assert generate(llm, requests, greedy(20)) == generate(
        engine(), requests, greedy(20)
    )
