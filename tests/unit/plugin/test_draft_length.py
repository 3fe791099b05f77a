# SPDX-License-Identifier: Apache-2.0
"""What the choice of drafts is made of: acceptance by request and kind, and costs of steps."""

from typing import Any

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.draft_length.controller import Acceptance
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts


def test_what_is_known_of_a_request_follows_it() -> None:
    acceptance = Acceptance(2, 2)
    acceptance.align(["a", "b", "c"])
    for _ in range(40):
        acceptance.learn(np.array([2, 2, 2]), np.array([2, 0, 1]))
    known = acceptance.probabilities()
    acceptance.align(["c", "new", "a"])
    np.testing.assert_allclose(acceptance.probabilities()[[0, 2]], known[[2, 0]])
    assert known[0, 1] > 0.8 and known[1, 0] < 0.2 and acceptance.trials[1].sum() == 0


def test_drafts_behind_a_rejected_draft_are_no_trials() -> None:
    acceptance = Acceptance(3, 2)
    acceptance.align(["a"])
    acceptance.learn(np.array([3]), np.array([1]))
    assert acceptance.trials.tolist() == [[1, 1, 0]] and acceptance.hits.tolist() == [
        [1, 0, 0]
    ]


def test_a_new_request_is_what_others_of_its_kind_are() -> None:
    acceptance = Acceptance(1, 2)
    acceptance.align(["a", "b"])
    acceptance.kinds = np.array([0, 1])
    for _ in range(200):
        acceptance.learn(np.array([1, 1]), np.array([1, 0]))
    acceptance.align(["c", "d"])
    acceptance.kinds = np.array([0, 1])
    greedy, sampled = acceptance.probabilities()[:, 0]
    assert greedy > 0.9 and sampled < 0.1


def test_costs_between_and_beyond_what_was_measured() -> None:
    table = CostTable(
        sizes=[1, 4, 8],
        counts=[0, 1, 3],
        seconds=[[10, 12, 14], [20, 26, 38], [40, 52, 80]],
    )
    costs = StepCosts(table)
    np.testing.assert_allclose(costs.relative(1), [1, 1.2, 1.3, 1.4])
    np.testing.assert_allclose(costs.relative(6), np.array([30, 39, 49, 59]) / 30)
    np.testing.assert_allclose(costs.relative(12), np.array([60, 78, 100, 122]) / 60)
    np.testing.assert_allclose(
        costs.relative(1000), np.array([5, 6.5, 8.5, 10.5]) / 5, rtol=0.01
    )


def test_costs_never_fall_with_requests_or_drafts() -> None:
    """A table of which two entries were measured while something else ran on the machine."""
    clean = CostTable(
        sizes=[1, 4], counts=[0, 1, 3], seconds=[[1.0, 1.5, 2.0], [2.0, 2.5, 3.0]]
    )
    noisy = CostTable(
        sizes=[1, 4], counts=[0, 1, 3], seconds=[[7.0, 1.5, 2.0], [2.0, 9.0, 3.0]]
    )
    assert StepCosts(clean).relative(1).tolist() == [1.0, 1.5, 1.75, 2.0]
    assert StepCosts(noisy).relative(1).tolist() == [1.0, 1.0, 1 + 1 / 6, 4 / 3]
    assert StepCosts(noisy).relative(4).tolist() == [1.0, 1.5, 1.5, 1.5]


BUSY = [[20.3, 20.3 * 18.51], [23.3, 23.3 * 1.48], [17.1, 17.1 * 4.48]]
RISING = [[5.0, 6.0], [6.0, 8.0]]


@pytest.mark.parametrize(
    ("sizes", "counts", "fastest", "second", "message"),
    [
        # Measured while other programs ran, and every later start read it.
        ([1, 4, 16], [0, 3], BUSY, BUSY, "1 request with 3 drafts 375"),
        ([1, 4, 16], [0, 3], BUSY, None, "not recorded"),
        (
            [1, 4],
            [0, 1],
            RISING,
            [[5.2, 6.1], [9.0, 8.2]],
            "4 requests with 0 drafts 6000.0 ms, and",
        ),
        ([1, 4], [0, 1], RISING, [[5.2, 6.1], [6.3, 8.2]], ""),
    ],
)
def test_a_table_of_a_busy_machine_is_implausible(
    sizes: list[int], counts: list[int], fastest: Any, second: Any, message: str
) -> None:
    reason = CostTable(
        sizes=sizes, counts=counts, seconds=fastest, second_fastest=second
    ).implausible()
    assert message in reason and bool(reason) is bool(message)


@pytest.mark.parametrize("growth", [0.0, 0.3])
def test_a_table_of_noisy_rounds_is_plausible(growth: float) -> None:
    """Rounds that are a few per cent too slow, and now and then one that takes twice its time."""
    rng = np.random.default_rng(0)
    truth = 1 + growth * np.add.outer(np.arange(4), np.arange(3))
    for _ in range(300):
        late = rng.exponential(0.04, (5, 4, 3)) + (rng.random((5, 4, 3)) < 0.02)
        fastest, second = np.sort(truth * (1 + late), axis=0)[:2]
        table = CostTable(
            sizes=[1, 4, 16, 64],
            counts=[0, 1, 3],
            seconds=fastest.tolist(),
            second_fastest=second.tolist(),
        )
        assert not table.implausible()
