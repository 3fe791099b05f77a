# SPDX-License-Identifier: Apache-2.0
"""Draws of rows of logits: Triton against torch, with the same random numbers."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_ppd.kernels import draws_triton
from vllm_ppd.kernels.draws import draw_rows as reference
from vllm_ppd.kernels.draws_triton import draw_rows, exponential
from vllm_ppd.kernels.sampling import INVALID, Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(rows: int, entries: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + entries)
    return (3 * torch.randn(rows, entries, generator=generator)).to(DEVICE, dtype)


def settings(*columns: list[float]) -> Sampling:
    return Sampling(*(torch.tensor(column, device=DEVICE) for column in columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 40, 2500])
def test_distributions_are_the_reference_s(entries: int, dtype: torch.dtype) -> None:
    """Rows without limits, with one, with both, and a greedy one."""
    logits = logits_of(6, entries, dtype)
    heat = [0.0, 1.0, 0.6, 0.6, 1.5, 0.01]
    limits = [20, entries, entries, 5, 30, 3], [0.9, 1.0, 0.9, 1.0, 0.5, 0.99]
    for sampling in (settings(heat), settings(heat, *limits)):
        tokens, probs = draw_rows(logits, sampling)
        expected, distribution = reference(logits, sampling)
        torch.testing.assert_close(probs, distribution, rtol=2e-5, atol=1e-9)
        assert tokens[0] == expected[0] == logits[0].float().argmax()
        assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert entries < 2500 or ((probs > 0).sum(dim=1)[[3, 5]] <= torch.tensor([5, 3], device=DEVICE)).all()


def test_ties_with_the_last_entry_stay() -> None:
    logits = torch.tensor([[4.0, 2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    sampling = settings([1.0, 1.0], [2, 1], [1.0, 0.3])
    _, probs = draw_rows(logits, sampling)
    assert ((probs > 0).sum(dim=1)).tolist() == [4, 5]
    torch.testing.assert_close(probs, reference(logits, sampling)[1])


def test_rows_that_are_not_finite_give_no_entry() -> None:
    logits = logits_of(4, 30)
    logits[1, 4], logits[2, 7], logits[3, 5:] = torch.nan, torch.inf, -torch.inf
    for limits in ((), ([5] * 4, [0.9] * 4)):
        sampling = settings([0.7] * 4, *limits)
        tokens, probs = draw_rows(logits, sampling)
        assert (tokens == INVALID).tolist() == [False, True, True, False]
        assert (reference(logits, sampling)[0] == INVALID).tolist() == [False, True, True, False]
        assert not probs[3, 5:].any()


def seeded(rows: int, *limits: list[float]) -> Sampling:
    """Rows at several temperatures, with seeds of all 64 bits."""
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    sampling = settings(([1.0, 0.5, 0.0, 1.5] * rows)[:rows], *limits)
    return sampling._replace(seeds=seeds * 2 + 1, positions=torch.arange(rows, device=DEVICE) * 1000)


@pytest.mark.parametrize("with_ids", [False, True])
def test_draws_one_after_the_other_are_the_reference_s(with_ids: bool) -> None:
    """With the same random numbers, in place and without distributions, and from some tokens of a vocabulary."""
    several = logits_of(5, 210).view(5, 3, 70)
    sampling = seeded(5, [9, 70, 70, 70, 3], [0.8, 0.9, 1.0, 1.0, 0.95])
    ids = torch.randperm(3000, device=DEVICE)[:70] if with_ids else None
    expected = [reference(several[:, number], sampling.ahead(number), ids) for number in range(3)]
    tokens, alone = (torch.full((5, 3), -7, device=DEVICE) for _ in range(2))
    for number in range(3):
        draws_triton.draw_next(several[:, number : number + 1].clone(), sampling, number, alone, None, ids)
        draws_triton.draw_next(several, sampling, number, tokens, several, ids)
        torch.testing.assert_close(several[:, number], expected[number][1], rtol=2e-5, atol=1e-9)
    assert tokens.tolist() == alone.tolist() == torch.stack([entries for entries, _ in expected], dim=1).tolist()
    ids_of_rows = torch.stack([torch.randperm(3000, device=DEVICE)[:70] for _ in range(5)])
    for call in (reference, draw_rows):
        drawn, probs = call(logits_of(5, 70), sampling, ids_of_rows, False)
        assert probs is None
        assert drawn.tolist() == reference(logits_of(5, 70), sampling, ids_of_rows)[0].tolist()


def test_without_seeds_draws_are_of_torch_s_generator() -> None:
    logits, sampling, runs = logits_of(8, 60), settings([1.0] * 8), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(draw_rows(logits, sampling)[0].tolist())
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
