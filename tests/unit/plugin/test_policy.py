# SPDX-License-Identifier: Apache-2.0
"""Drafting costs an engine no throughput at any load: the start-up measurement and the
policy are the real ones, and arithmetic gives the seconds of each step.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from conftest import full_but
from simulated import (
    ENGINES,
    Fixed,
    Load,
    Result,
    Roofline,
    probability,
    run,
    table_of,
)

from vllm_ppd.vllm_plugins.draft_length import measure
from vllm_ppd.vllm_plugins.draft_length.acceptance import Acceptance
from vllm_ppd.vllm_plugins.draft_length.costs import (
    NO_DRAFTS,
    CostTable,
    Plan,
    StepCosts,
)
from vllm_ppd.vllm_plugins.draft_length.policy import PROBE, DraftPolicy, Step
from vllm_ppd.vllm_plugins.draft_length.seconds import Bucket

K = 3
STEPS = 3000
LEARNING = 256  # steps that are not judged
MAX_REQUESTS = 512
LENGTHS = (1.1, 1.3, 1.6, 2.2, 3.0)  # tokens of a request in a step with K drafts
COUNTS = full_but([[0, K]], ([0, K], [0, 1, K], [0, 3, 7]))
LOADS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 512)


def wandering() -> list[Load]:
    """A batch that grows and shrinks, and prompts that nobody expects."""
    rng = random.Random(5)
    loads = []
    requests = 40
    for _ in range(STEPS):
        requests = min(max(requests + rng.randint(-4, 4), 1), 128)
        loads.append(Load(requests, prompt=rng.choice((0, 0, 0, 500, 2048))))
    return loads


def long_prompts(requests: int, chunk: int) -> list[Load]:
    """Prompts of twenty chunks, and as many steps without."""
    return [
        Load(
            requests,
            prompt=chunk * (step % 40 < 20),
            waiting=chunk * (step % 40 < 19),
        )
        for step in range(STEPS)
    ]


SCENARIOS: dict[str, Callable[[], Iterable[Load]]] = {
    "ramp": lambda: (Load(1 + MAX_REQUESTS * i // STEPS) for i in range(STEPS)),
    "fall": lambda: (Load(MAX_REQUESTS - 500 * i // STEPS) for i in range(STEPS)),
    "bursts": lambda: (Load(256 if i // 150 % 2 else 2) for i in range(STEPS)),
    "prompts": lambda: (
        Load(64, prompt=2048 * (i % 5 == 0)) for i in range(STEPS)
    ),
    "long prompts": lambda: long_prompts(64, 2048),
    "long prompts, many requests": lambda: long_prompts(256, 7000),
    "contexts to 32K": lambda: (
        Load(32, context=200 + 32000 * i // STEPS) for i in range(STEPS)
    ),
    "idle gaps": lambda: (Load(1, idle=i % 20 == 0) for i in range(STEPS)),
    "wandering": wandering,
}


def served(
    name: str,
    loads: list[Load],
    length: float,
    counts: Sequence[int] = (0, K),
    skip: int = LEARNING,
) -> tuple[Result, float]:
    """(A run, the gain of the best number of drafts if that is always taken)."""
    engine = ENGINES[name]
    accepts = probability(length, K)
    table = table_of(
        engine,
        counts,
        MAX_REQUESTS,
        random.Random(1),
    )
    result = run(
        engine,
        DraftPolicy(table, 1, True, {}),
        loads,
        lambda *_: accepts,
        skip=skip,
    )
    fixed = [
        run(
            engine,
            Fixed(Plan(count)),
            loads,
            lambda *_: accepts,
            skip=skip,
        ).gain
        for count in counts
    ]
    return result, max(fixed)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("length", full_but({1.3, 2.2}, LENGTHS))
@pytest.mark.parametrize("name", ENGINES)
def test_never_slower_at_any_load(
    name: str, length: float, counts: list[int]
) -> None:
    shares = []
    for requests in LOADS:
        result, best = served(
            name,
            [Load(requests)] * 1000,
            length,
            counts,
        )
        assert result.gain >= 0.98, requests
        shares.append(result.gain / best)
    assert sum(shares) / len(shares) >= 0.97


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("length", full_but({1.1, 1.6}, LENGTHS))
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", full_but({"70B"}, ENGINES))
def test_never_slower_while_the_load_changes(
    name: str, scenario: str, length: float, counts: list[int]
) -> None:
    loads = list(SCENARIOS[scenario]())
    result, best = served(
        name,
        loads,
        length,
        counts,
    )
    assert result.gain >= 0.98
    assert result.gain >= 0.97 * best


def test_drafts_that_never_pay_cost_nothing_in_the_long_run() -> None:
    loads = [Load(64)] * 12000
    result, _ = served(
        "70B",
        loads,
        1.1,
        skip=4000,
    )
    assert result.gain >= 0.997


def test_a_stall_of_a_first_step_is_capped() -> None:
    bucket = Bucket()
    bucket.add(Plan(3), 500.0)
    assert bucket.means[Plan(3)].value == 4


def test_drafts_come_back_where_the_text_changes() -> None:
    engine = ENGINES["70B"]
    policy = DraftPolicy(
        table_of(
            engine,
            [0, K],
            16,
            None,
        ),
        1,
        True,
        {},
    )
    poor = probability(1.02, K)
    good = probability(2.5, K)
    loads = [Load(16)] * 12000
    result = run(
        engine, policy, loads, lambda step, _: poor if step < 2000 else good
    )
    assert not any(result.drafts[1900:2000])
    assert result.drafts[-500:].count(K) > 490


def test_a_table_that_is_wrong_is_corrected_by_what_was_served() -> None:
    """Drafts that the table takes for free cost more than they bring, and the reverse."""
    engine = ENGINES["8B"]
    accepts = probability(1.6, K)
    for requests, seconds, drafts in ((128, [1.0, 1.0], 0), (16, [1.0, 1.7], K)):
        table = CostTable(sizes=[1], counts=[0, K], seconds=[seconds])
        policy = DraftPolicy(StepCosts(table), 1, True, {})
        result = run(
            engine,
            policy,
            [Load(requests)] * 1500,
            lambda *_: accepts,
        )
        assert result.drafts[-500:].count(drafts) > 450


def test_another_size_of_batches_is_compared_at_once() -> None:
    """However long ago drafts were compared in smaller batches, where they pay."""
    table = CostTable(sizes=[1], counts=[0, K], seconds=[[1.0, 1.0]])
    policy = DraftPolicy(StepCosts(table), 1, True, {})
    accepts = probability(1.2, K)
    loads = [Load(16)] * 3000 + [Load(128)] * 200
    result = run(ENGINES["8B"], policy, loads, lambda *_: accepts)
    assert result.drafts[2900:3000].count(K) > 90
    assert result.drafts[-100:].count(0) > 90


def test_requests_that_opted_out_pay_for_the_others_drafts() -> None:
    table = CostTable(sizes=[1], counts=[0, K], seconds=[[1.0, 1.5]])
    policy = DraftPolicy(StepCosts(table), 2, True, {})
    for _ in range(50):
        policy.observe(
            Step(
                4,
                0,
                Plan(K),
                Plan(K),
            ),
            None,
            ["a", "b"],
            [0, 1],
            [3, 3],
        )
    assert policy.choose(
        2,
        0,
        ["a", "b"],
        [0, 1],
    ) == Plan(K)
    for _ in range(64):
        drafts = policy.choose(
            40,
            0,
            ["a"],
            [0],
        ).drafts
    assert drafts == 0
    assert (
        policy.choose(
            40,
            0,
            [],
            [],
        )
        == NO_DRAFTS
    )


def test_a_requests_own_number_bounds_its_expected_drafts() -> None:
    names = ["own", "all"]
    limits = {"own": 1}
    acceptance = Acceptance(K, 1, limits)
    for _ in range(100):
        acceptance.observe(names, [0, 0], K, [2, 1 + K])
        acceptance.learn()
    # Second and third drafts of the first request count as neither right nor wrong.
    assert min(acceptance.kinds[0].expected[K:]) > 2.8
    one, *_, three = acceptance.per_request(["own"], [0])[1:]
    assert one == three
    both = acceptance.per_request(names, [0, 0])
    limits.clear()
    every = acceptance.per_request(names, [0, 0])
    assert both[1] == every[1] and both[K] < every[K] - 0.9


def test_batch_sizes_to_measure() -> None:
    assert measure.sizes_to_measure(512, 3) == [1, 16, 64, 128, 256, 512]
    assert measure.sizes_to_measure(1, 3) == [1]
    assert measure.sizes_to_measure(20, 5) == [1, 16, 20]


def with_exits(*shares: float) -> Roofline:
    """An engine with early exits behind shares of its layers."""
    engine = ENGINES["70B"]
    exits = tuple(share * engine.weights for share in shares)
    return dataclasses.replace(engine, drafting=2e-4, exits=exits)


@pytest.mark.parametrize(
    ("shares", "lengths", "best"),
    [
        ((1 / 8, 1 / 4, 1 / 2), (1.2, 2.0, 2.5), Plan(K, 1)),
        ((1 / 8, 1 / 2), (1.1, 2.5), Plan(K, 1)),
        ((1 / 8, 1 / 2), (2.0, 2.4), Plan(K, 0)),
        ((1 / 8, 1 / 2), (1.05, 1.1), NO_DRAFTS),
    ],
)
@pytest.mark.parametrize("requests", [4, 16])
def test_the_best_exit_is_found(
    requests: int,
    shares: tuple[float, ...],
    lengths: tuple[float, ...],
    best: Plan,
) -> None:
    """By acceptance and seconds of each, and poor ones cost little on the way."""
    engine = with_exits(*shares)
    rates = [probability(length, K) for length in lengths]
    table = table_of(engine, [0, K], 64, random.Random(1))
    result, fixed = (
        run(
            engine,
            policy,
            [Load(requests)] * 4000,
            lambda _, exit: rates[exit],
            skip=2000,
        )
        for policy in (DraftPolicy(table, 1, True, {}), Fixed(best))
    )
    assert result.gain >= 0.98 * fixed.gain >= 0.98
    assert result.plans.count(best) >= 0.9 * len(result.plans)


def test_the_exit_follows_the_text() -> None:
    engine = with_exits(1 / 8, 1 / 4)
    policy = DraftPolicy(table_of(engine, [0, K], 16, None), 1, True, {})
    rates = [probability(length, K) for length in (1.3, 2.2)]
    result = run(
        engine,
        policy,
        [Load(16)] * 6000,
        lambda step, exit: rates[exit if step < 2000 else 0],
    )
    assert result.plans[1500:2000].count(Plan(K, 1)) > 450
    # The deeper exit no longer pays; one exploration may come
    assert result.plans[-200:].count(Plan(K, 1)) <= PROBE
