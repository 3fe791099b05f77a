# SPDX-License-Identifier: Apache-2.0
"""Draws of rows of logits, and verification by the tokens drawn: Triton against torch."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, seeded

from vllm_ppd.kernels import sampling as reference
from vllm_ppd.kernels.sampling import INVALID, UNLIMITED
from vllm_ppd.kernels.sampling_triton import (
    accept_drawn,
    draw_next,
    draw_rows,
    exponential,
)

torch.set_default_device(DEVICE)


def logits_of(
    rows: int, entries: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    torch.manual_seed(rows + entries)
    return (3 * torch.randn(rows, entries)).to(dtype)


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [(1, torch.float32), (40, torch.bfloat16), (2500, torch.float32)],
)
def test_draws_are_the_reference_s(entries: int, dtype: torch.dtype) -> None:
    """Rows without limits, with one, with both, and a greedy one, each with several seeds."""
    times = 3
    logits = logits_of(6, entries, dtype).repeat(times, 1)
    heat = [0.0, 1.0, 0.6, 0.6, 1.5, 0.01] * times
    top_k = [
        20,
        entries,
        entries,
        5,
        30,
        3,
    ] * times
    top_p = [0.9, 1.0, 0.9, 1.0, 0.5, 0.99] * times
    for sampling in (seeded(heat), seeded(heat, top_k, top_p)):
        tokens = draw_rows(logits, sampling)
        assert torch.equal(tokens, reference.draw_rows(logits, sampling))
        assert tokens[0] == logits[0].float().argmax()
    best = logits.float().topk(min(5, entries), dim=1).indices
    assert (tokens[3::6, None] == best[3::6]).any(dim=1).all()


@pytest.mark.parametrize("draw", [draw_rows, reference.draw_rows])
@pytest.mark.parametrize(
    ("top_k", "top_p", "drawn"),
    [
        pytest.param(UNLIMITED, 1.0, 5, marks=pytest.mark.full),
        (UNLIMITED, 0.9, 3),
        (4, 1.0, 2),
        (20, 0.6, 1),
        pytest.param(1, 1.0, 1, marks=pytest.mark.full),
    ],
)
def test_entries_below_the_least_weight_are_not_drawn(
    draw, top_k: int, top_p: float, drawn: int
) -> None:
    """Weights relative to the best, after the temperature."""
    weights = torch.tensor([1.0, 0.3, 0.12, 0.09, 0.04])
    draws = 120 if drawn == 5 else 40
    sampling = seeded([0.5] * draws, [top_k] * draws, [top_p] * draws)
    tokens = draw(0.5 * weights.log().repeat(draws, 1) + 7, sampling)
    assert set(tokens.tolist()) == set(range(drawn))


@pytest.mark.parametrize("draw", [draw_rows, reference.draw_rows])
@pytest.mark.parametrize("limits", [(), ([5] * 4, [0.9] * 4)])
def test_rows_that_are_not_finite_give_no_entry(draw, limits) -> None:
    logits = logits_of(4, 30)
    logits[1, 4] = torch.nan
    logits[2, 7] = torch.inf
    logits[3, 5:] = -torch.inf
    tokens = draw(logits, seeded([0.7] * 4, *limits))
    assert (tokens == INVALID).tolist() == [False, True, True, False]
    assert tokens[3] < 5


@pytest.mark.parametrize("shape", [None, (70,), (5, 70)])
def test_draws_one_after_the_other_are_the_reference_s(
    shape: tuple[int, ...] | None,
) -> None:
    """With the same random numbers, and from some tokens of a vocabulary."""
    logits = logits_of(5, 70)
    sampling = seeded(
        [1.0, 0.5, 0.0, 1.5, 1.0],
        [9, 70, 70, 70, 3],
        [0.8, 0.9, 1.0, 1.0, 0.95],
    )
    ids = None if shape is None else torch.rand(shape).argsort(-1) * 41
    tokens = torch.full((5, 3), -7)
    for number in range(3):
        draw_next(
            logits,
            sampling,
            number,
            tokens,
            ids,
        )
        expected = reference.draw_rows(logits, sampling.ahead(number), ids)
        assert torch.equal(tokens[:, number], expected)


@triton.jit
def fill(out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.full([BLOCK], 5, tl.int64)
    tl.store(out + place, exponential(seed, seed, place))


def test_the_race_s_noise_is_exponential_down_to_its_least() -> None:
    """The least of a whole vocabulary's variates decides: coarse ones would bias it."""
    draws = torch.empty(1 << 22)
    fill[(4,)](draws, BLOCK=1 << 20)
    assert draws.min() > 0
    assert draws.isfinite().all()
    for bound in (2**-18, 2**-12, 2**-7, 0.5, 3.0):
        chance = -torch.expm1(torch.tensor(-bound, dtype=torch.float64)).item()
        deviation = (len(draws) * chance * (1 - chance)) ** 0.5
        assert (
            abs((draws < bound).sum().item() - len(draws) * chance)
            < 5 * deviation
        )


@pytest.mark.parametrize("accept", [accept_drawn, reference.accept_drawn])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_accepted_as_long_as_they_are_drawn(accept, seed: int) -> None:
    """For ragged numbers of drafts, and drafts that must not be used."""
    torch.manual_seed(seed)
    width = 4
    numbers = torch.randint(1, width + 1, (5,))
    starts = torch.tensor([0, *numbers.tolist()]).cumsum(0).int()
    drawn = torch.randint(0, 2, (int(starts[-1]),))
    drafts = torch.randint(-1, 2, drawn.shape).int()
    tokens, counts = accept(
        drawn,
        drafts,
        starts,
        width,
    )
    assert tokens.dtype == drafts.dtype and counts.dtype == torch.int32
    for request, (start, end) in enumerate(pairwise(starts.tolist())):
        matches = drawn[start : end - 1] == drafts[start + 1 : end]
        number = 1 + int(matches.long().cumprod(0).sum())
        assert counts[request] == number
        assert torch.equal(
            tokens[request, :number], drawn[start : start + number].int()
        )
