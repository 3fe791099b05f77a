# SPDX-License-Identifier: Apache-2.0
"""What drafts cost, told from steps of a machine that is not as fast in one minute as in the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.adaptive.step_costs import ENOUGH, FIRST, SIZES, StepCosts

TRUE = [1.0, 1.3, 1.4, 1.5, 1.6]  # of 0, 1, ... drafts
MOST = len(TRUE) - 1


def timed(
    costs: StepCosts,
    drafts: Iterable[int],
    pace: Callable[[int], float] = lambda step: 1.0,
    size: int = 0,
    noise: float = 0.03,
    true: list[float] = TRUE,
) -> StepCosts:
    """Costs after steps of so many drafts each, on a machine whose step takes `pace` times as long as it might."""
    rng = np.random.default_rng(0)
    for step, many in enumerate(drafts):
        costs.add(size, many, true[many] * pace(step) * float(np.exp(noise * rng.standard_normal())))
        if step % 16 == 15:
            costs.refresh()
    costs.refresh()
    return costs


def told(costs: StepCosts, size: int = 0, doubt: float = 0.0) -> np.ndarray:
    relative = costs.relative(size, doubt)
    assert relative is not None
    return relative


def test_nothing_is_told_before_steps_with_and_without_drafts_were_timed() -> None:
    costs, some = StepCosts(MOST), FIRST + ENOUGH
    timed(costs, [0] * some)
    assert costs.knows(0, 0) and costs.relative(0) is None and costs.plain(1) > 0
    timed(costs, [2] * (some - 1))
    assert not costs.knows(0, 2) and costs.relative(0) is None
    timed(costs, [2])
    assert costs.knows(0, 2) and not costs.knows(0, 2, times=2) and costs.relative(0) is not None


def test_what_was_not_timed_lies_on_a_line_in_doubt() -> None:
    costs = timed(StepCosts(MOST), ([0] * 6 + [1] * 6 + [3] * 6) * 4)
    relative = told(costs)
    np.testing.assert_allclose(relative, TRUE, rtol=0.05)
    width = np.log(told(costs, doubt=1.0) / told(costs, doubt=-1.0))
    assert width[0] == 0 and width[2] > max(width[1], width[3]) and width[4] > width[2]
    assert width[4] < 0.5


@pytest.mark.parametrize("slow", [0.7, 1.5])
def test_a_machine_that_slows_down_while_all_draft_does_not_make_drafts_dear(slow: float) -> None:
    """Medians of steps of either kind, timed apart, would be off by as much as the machine."""
    drafts = ([0] * 6 + [2] * 6) * 4 + [2] * 200
    costs = timed(StepCosts(MOST), drafts, lambda step: slow if step > 60 else 1.0)
    np.testing.assert_allclose(told(costs)[2], TRUE[2], rtol=0.05)
    timed(costs, [0] * 200, lambda step: slow**2)
    np.testing.assert_allclose(told(costs)[2], TRUE[2], rtol=0.08)
    np.testing.assert_allclose(costs.plain(1), slow**2, rtol=0.05)


def test_a_machine_that_slows_down_bit_by_bit_does_not_make_drafts_dear() -> None:
    drafts = ([0] * 6 + [2] * 6) * 4 + [2] * 200 + [0] * 200
    costs = timed(StepCosts(MOST), drafts, lambda step: float(np.exp(0.01 * step)))
    np.testing.assert_allclose(told(costs)[2], TRUE[2], rtol=0.05)


def test_a_late_step_says_little() -> None:
    costs = timed(StepCosts(MOST), ([0] * 6 + [2] * 6) * 8, lambda step: 5.0 if step % 12 == 8 else 1.0)
    np.testing.assert_allclose(told(costs)[2], TRUE[2], rtol=0.06)


def turns_of(paces: np.ndarray, plain: int) -> np.ndarray:
    """What is told of two drafts, and what it may well be [turns, 2], after turns of steps [turns, steps] so fast."""
    costs, found = timed(StepCosts(MOST), [0] * (FIRST + ENOUGH)), []
    for turn in paces:
        timed(costs, [2] * (len(turn) - plain) + [0] * plain, lambda step, turn=turn: turn[step], noise=0.0)
        found.append((told(costs)[2], told(costs, doubt=1.0)[2]))
    return np.array(found)


def test_late_steps_now_and_then_do_not_make_known_prices_unknown() -> None:
    """Three of them are no sign of another price, even if none was early in between."""
    rng = np.random.default_rng(1)
    paces = np.exp(0.03 * rng.standard_normal((100, 63))) * np.where(rng.random((100, 63)) < 0.1, 1.4, 1.0)
    found = turns_of(paces, 3)[20:]
    np.testing.assert_allclose(found[:, 0], TRUE[2], rtol=0.08)
    assert (found[:, 1] < 1.08 * found[:, 0]).all()


def test_a_machine_that_is_not_equally_fast_at_a_kind_each_time_leaves_its_price_in_doubt() -> None:
    """The steps of a time are off together, by some per cent: to time more of them on end says no more."""
    rng = np.random.default_rng(2)
    paces = np.exp(
        0.03 * rng.standard_normal((200, 36)) + np.repeat(0.05 * rng.standard_normal((200, 2)), [30, 6], axis=1)
    )
    price, may_be = np.log(turns_of(paces, 6)[20:]).T
    assert 0.7 < np.sqrt(np.mean(((price - np.log(TRUE[2])) / (may_be - price)) ** 2)) < 1.3


def test_the_first_steps_of_a_kind_are_not_timed() -> None:
    """What is told of drafts for the first time decides whether they are ever made again."""
    costs, seen = timed(StepCosts(MOST), [0] * 6), 0
    while not costs.knows(0, 2):
        factor = 1.7 if seen < 2 else 1.0
        timed(costs, [0] * 6 + [2], true=[1.0, 0.0, factor * TRUE[2]])
        seen += 1
    np.testing.assert_allclose(told(costs)[2], TRUE[2], rtol=0.06)


@pytest.mark.parametrize("now", [1.05, 4.0])
def test_drafts_that_have_become_cheaper_or_dearer_are_found_out_after_some_comparisons(now: float) -> None:
    """As a server does it, whose drafts pay: hundreds of steps with them, and one without that is timed."""
    costs = timed(StepCosts(MOST), ([0] * 6 + [2] * 6) * 8)
    timed(costs, ([2] * 126 + [0]) * 6, true=[1.0, 1.0, now])
    np.testing.assert_allclose(told(costs)[2], now, rtol=0.1)


def test_steps_that_were_not_timed_for_long_are_in_doubt() -> None:
    costs = timed(StepCosts(MOST), ([0] * 6 + [2] * 6) * 8)
    before = told(costs, doubt=1.0)[2] / told(costs)[2]
    timed(costs, [0] * 2000)
    assert told(costs, doubt=1.0)[2] / told(costs)[2] > 1.02 * before


def test_doubt_grows_no_further_than_to_what_was_known_at_first() -> None:
    costs = timed(StepCosts(MOST), ([0] * 6 + [2] * 6) * 8)
    timed(costs, [0] * 300)
    costs.add(0, 0, 1.0, steps=10_000_000)
    costs.refresh()
    width = np.log(told(costs, doubt=1.0) / told(costs))
    assert np.isfinite(width).all() and 0.3 < width[2] < 0.6


def test_drafts_never_seem_to_save_time() -> None:
    costs = timed(StepCosts(2), ([0] * 6 + [1] * 6 + [2] * 6) * 4, true=[1.0, 0.8, 0.9])
    np.testing.assert_allclose(told(costs), [1, 1, 1])


def test_more_drafts_may_take_less_time() -> None:
    """As products of two rows do beside those of three or four on some processors."""
    dear = [1.0, 1.33, 1.21, 1.16]
    costs = timed(StepCosts(3), ([0] * 6 + [1] * 6 + [2] * 6 + [3] * 6) * 4, true=dear)
    np.testing.assert_allclose(told(costs), dear, rtol=0.05)


def test_what_one_draft_costs_says_less_of_others_at_another_batch_size() -> None:
    costs = timed(StepCosts(3), ([0] * 6 + [1] * 6 + [3] * 6) * 8, true=[1.0, 1.33, 1.21, 1.16])
    timed(costs, ([0] * 6 + [3] * 6) * 4, size=1, true=[1.0, 1.1, 1.14, 1.27])
    np.testing.assert_allclose(told(costs, 1)[3], 1.27, rtol=0.05)
    assert told(costs, 1, doubt=-1.0)[1] < 1.33 < told(costs, 1, doubt=1.0)[1]
    assert np.log(told(costs, 1, doubt=1.0) / told(costs, 1))[1] > 1.5 * np.log(told(costs, doubt=1.0) / told(costs))[1]


def test_batch_sizes_that_were_not_timed_take_over_what_is_known_of_others_in_doubt() -> None:
    costs = timed(StepCosts(MOST), ([0] * 6 + [2] * 6) * 8, size=2)
    np.testing.assert_array_equal(told(costs, 5), told(costs, 2))
    assert told(costs, 5, doubt=1.0)[2] > 1.2 * told(costs, 2, doubt=1.0)[2]
    # A few steps of its own, in which drafts cost as much: what is known of it is not what these say alone.
    timed(costs, [0] * 6 + [2] * (FIRST + ENOUGH), size=5, noise=0.0, true=[3.0, 0.0, 3 * TRUE[2]])
    np.testing.assert_allclose(told(costs, 5)[2], TRUE[2], rtol=0.06)
    np.testing.assert_allclose(costs.plain(int(SIZES[5])), 3.0, rtol=0.05)
    assert costs.plain(int(SIZES[9])) == costs.plain(int(SIZES[5])) and StepCosts(1).plain(1) == 0


def test_ranks_take_the_first_ones_numbers() -> None:
    costs = StepCosts(1, agree=lambda numbers: np.where(np.isfinite(numbers), np.log(2.0), numbers))
    timed(costs, [0] * 6 + [1] * 6, true=[1.0, 5.0])
    np.testing.assert_allclose(told(costs), [1, 2])


def test_batch_sizes() -> None:
    assert [StepCosts.size(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 10_000)] == [0, 1, 2, 3, 4, 4, 5, 6, len(SIZES) - 1]
