# SPDX-License-Identifier: Apache-2.0
"""Draws of rows of logits, and verification by the tokens drawn: Triton against torch."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import sampling as reference
from vllm_ppd.kernels import sampling_triton
from vllm_ppd.kernels.sampling import INVALID, Sampling
from vllm_ppd.kernels.sampling_triton import accept_drawn, draw_rows, exponential

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(
    rows: int, entries: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + entries)
    return (3 * torch.randn(rows, entries, generator=generator)).to(DEVICE, dtype)


def seeded(heat: list[float], *limits: list[float]) -> Sampling:
    """Rows at temperatures and with limits, with seeds of all 64 bits."""
    rows = len(heat)
    columns = [torch.tensor(column, device=DEVICE) for column in (heat, *limits)]
    seeds = torch.randint(
        -(1 << 62), 1 << 62, (rows,), generator=torch.Generator().manual_seed(rows)
    )
    positions = torch.arange(rows, device=DEVICE) * 1000
    return Sampling(*columns)._replace(
        seeds=seeds.to(DEVICE) * 2 + 1, positions=positions
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 40, 2500])
def test_draws_are_the_reference_s(entries: int, dtype: torch.dtype) -> None:
    """Rows without limits, with one, with both, and a greedy one, each with several seeds."""
    times = 3
    logits = logits_of(6, entries, dtype).repeat(times, 1)
    heat = [0.0, 1.0, 0.6, 0.6, 1.5, 0.01] * times
    top_k = [20, entries, entries, 5, 30, 3] * times
    top_p = [0.9, 1.0, 0.9, 1.0, 0.5, 0.99] * times
    for sampling in (seeded(heat), seeded(heat, top_k, top_p)):
        tokens = draw_rows(logits, sampling)
        assert tokens.tolist() == reference.draw_rows(logits, sampling).tolist()
        assert tokens[0] == logits[0].float().argmax()
    best = logits.float().topk(min(5, entries), dim=1).indices
    assert all(tokens[row] in best[row] for row in range(3, len(tokens), 6))


def test_ties_with_the_last_entry_stay() -> None:
    rows = torch.tensor(
        [[4.0, 2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE
    )
    logits = rows.repeat_interleave(200, dim=0)
    tokens = draw_rows(
        logits, seeded([1.0] * 400, [2] * 200 + [1] * 200, [1.0] * 200 + [0.3] * 200)
    )
    assert set(tokens[:200].tolist()) == {0, 1, 2, 3}
    assert set(tokens[200:].tolist()) == {0, 1, 2, 3, 4}


def test_rows_that_are_not_finite_give_no_entry() -> None:
    logits = logits_of(4, 30)
    logits[1, 4] = torch.nan
    logits[2, 7] = torch.inf
    logits[3, 5:] = -torch.inf
    for limits in ((), ([5] * 4, [0.9] * 4)):
        sampling = seeded([0.7] * 4, *limits)
        for call in (draw_rows, reference.draw_rows):
            tokens = call(logits, sampling)
            assert (tokens == INVALID).tolist() == [False, True, True, False]
            assert tokens[3] < 5


@pytest.mark.parametrize("with_ids", [False, True])
def test_draws_one_after_the_other_are_the_reference_s(with_ids: bool) -> None:
    """With the same random numbers, from the logits of all draws or of one, and from
    some tokens of a vocabulary.
    """
    several = logits_of(5, 210).view(5, 3, 70)
    sampling = seeded(
        [1.0, 0.5, 0.0, 1.5, 1.0], [9, 70, 70, 70, 3], [0.8, 0.9, 1.0, 1.0, 0.95]
    )
    ids = torch.randperm(3000, device=DEVICE)[:70] if with_ids else None
    expected = [
        reference.draw_rows(several[:, number], sampling.ahead(number), ids)
        for number in range(3)
    ]
    tokens = torch.full((5, 3), -7, device=DEVICE)
    alone = torch.full((5, 3), -7, device=DEVICE)
    for number in range(3):
        sampling_triton.draw_next(
            several[:, number : number + 1].clone(), sampling, number, alone, ids
        )
        sampling_triton.draw_next(several, sampling, number, tokens, ids)
    assert tokens.tolist() == alone.tolist() == torch.stack(expected, dim=1).tolist()
    ids_of_rows = torch.stack(
        [torch.randperm(3000, device=DEVICE)[:70] for _ in range(5)]
    )
    logits = logits_of(5, 70)
    expected = reference.draw_rows(logits, sampling, ids_of_rows)
    assert draw_rows(logits, sampling, ids_of_rows).tolist() == expected.tolist()


def test_without_seeds_draws_are_of_torch_s_generator() -> None:
    logits = logits_of(8, 60)
    sampling = Sampling(torch.ones(8, device=DEVICE))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(draw_rows(logits, sampling).tolist())
    assert runs[0] == runs[1] != runs[2]


@triton.jit
def fill(out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.full([BLOCK], 5, tl.int64)
    tl.store(out + place, exponential(seed, seed, place))


def test_the_race_s_noise_is_exponential_down_to_its_least() -> None:
    """The least of a whole vocabulary's variates decides: coarse ones would bias it."""
    draws = torch.empty(1 << 22, device=DEVICE)
    fill[(4,)](draws, BLOCK=1 << 20)
    assert draws.min() > 0
    assert draws.isfinite().all()
    for bound in (2**-18, 2**-12, 2**-7, 0.5, 3.0):
        chance = -torch.expm1(torch.tensor(-bound, dtype=torch.float64)).item()
        deviation = (len(draws) * chance * (1 - chance)) ** 0.5
        assert abs((draws < bound).sum().item() - len(draws) * chance) < 5 * deviation


WIDTH = 4


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_accepted_as_long_as_they_are_drawn(seed: int) -> None:
    """For ragged numbers of drafts, and drafts that must not be used."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, WIDTH + 1, (5,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    drawn, drafts = torch.randint(0, 2, (2, int(rows.sum())), generator=generator)
    drafts = torch.where(
        torch.rand(drafts.shape, generator=generator) < 0.1, -1, drafts
    ).int()
    arguments = drawn.to(DEVICE), drafts.to(DEVICE), starts.int().to(DEVICE), WIDTH
    for tokens, counts in (
        reference.accept_drawn(*arguments),
        accept_drawn(*arguments),
    ):
        assert tokens.dtype == drafts.dtype and counts.dtype == torch.int32
        for request, start in enumerate(starts[:-1].tolist()):
            number = 1
            while (
                number < rows[request]
                and drawn[start + number - 1] == drafts[start + number]
            ):
                number += 1
            assert counts[request] == number
            assert (
                tokens[request, :number].tolist()
                == drawn[start : start + number].tolist()
            )
