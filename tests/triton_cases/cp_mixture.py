# SPDX-License-Identifier: Apache-2.0
"""The chain of CP drafts: Triton against torch, with the same random numbers."""

from typing import Any

import pytest
import torch

from vllm_ppd.kernels import cp_mixture_triton
from vllm_ppd.kernels.cp_mixture import draft_chain as reference
from vllm_ppd.kernels.cp_mixture_triton import draft_chain
from vllm_ppd.kernels.sampling import INVALID, Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def case(rows: int, positions: int, rank: int, vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Log weights, logits and first tokens; the last row's first token is unknown."""
    generator = torch.Generator().manual_seed(rows + vocab)
    weights = torch.randn(rows, rank, generator=generator).log_softmax(-1)
    logits = (3 * torch.randn(rows, positions, rank, vocab, generator=generator)).to(dtype)
    first = torch.randint(vocab, (rows,), generator=generator)
    first[-1] = -1
    return [tensor.to(DEVICE) for tensor in (weights, logits, first)]


def same(actual: Any, expected: Any) -> None:
    assert actual[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(actual[1], expected[1], rtol=2e-5, atol=1e-9, equal_nan=True)


@TYPES
@pytest.mark.parametrize(
    ("rows", "positions", "rank", "vocab"),
    [(3, 4, 3, 257), (2, 2, 1, 5000), (1, 3, 5, 1), (2, 3, 3, 32_000), (1, 2, 2, 151_936)],
)
def test_greedy_chains(
    dtype: torch.dtype, rows: int, positions: int, rank: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu" and vocab > 5000:
        monkeypatch.setattr(cp_mixture_triton, "BLOCK_V", 8192)  # the interpreter counts operations, not numbers
    made = case(rows, positions, rank, vocab, dtype)
    kept = made[0].clone()
    same(draft_chain(*made), reference(*made))
    assert torch.equal(made[0], kept)


@pytest.mark.parametrize("positions", [1, 3])
def test_chains_without_a_first_token(positions: int) -> None:
    """Every position is drafted, the first one from the weights as they are."""
    weights, logits, _ = case(3, positions, 3, 5000, torch.float32)
    heat = torch.tensor([0.0, 0.01, 0.0], device=DEVICE)
    limits = torch.full((3,), 4, device=DEVICE), torch.full((3,), 0.9, device=DEVICE)
    for sampling in (None, Sampling(heat), Sampling(heat, *limits)):
        actual = draft_chain(weights, logits, None, sampling)
        assert actual[1].shape == (3, positions, 5000)
        same(actual, reference(weights, logits, None, sampling))


def test_positions_in_turn_are_the_chain() -> None:
    weights, logits, _ = case(3, 3, 3, 70, torch.float32)
    tokens, probs, _ = reference(weights, logits, None)
    for position in range(3):
        expected = reference(weights, logits[:, position : position + 1], None)
        token, drawn, weights = draft_chain(weights, logits[:, position : position + 1], None)
        same((token, drawn), (tokens[:, position : position + 1], probs[:, position : position + 1]))
        torch.testing.assert_close(weights, expected[2], rtol=2e-5, atol=1e-6)


def test_a_slice_of_the_vocabulary() -> None:
    weights, logits, first = case(3, 3, 3, 300, torch.bfloat16)
    same(draft_chain(weights, logits[..., :200], first % 200), reference(weights, logits[..., :200], first % 200))


def test_ties_masks_and_nan() -> None:
    weights, logits, first = case(5, 3, 2, 40, torch.float32)
    logits[0] = 1.0  # every token alike
    logits[1, :, :, 3:] = float("-inf")
    first[1] = 30  # ruled out by every expert
    logits[2, 1, 1] = float("nan")
    logits[3, :, 0, 7] = float("-inf")
    weights[3] = torch.tensor([0.0, float("-inf")], device=DEVICE)
    actual = draft_chain(weights, logits, first)
    same(actual, reference(weights, logits, first))
    assert actual[0][0].tolist() == [0, 0]
    assert actual[0][2, 0].item() == INVALID
    assert actual[1][2, 0].isnan().all()
    assert (actual[0][1] < 3).all()


def test_greedy_rows_beside_sampling_ones() -> None:
    weights, logits, first = case(4, 3, 3, 70, torch.float32)
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.9e-5], device=DEVICE)
    tokens, probs, _ = draft_chain(weights, logits, first, Sampling(temperature))
    greedy, plain, _ = reference(weights, logits, first)
    for row in (0, 3):
        assert tokens[row].tolist() == greedy[row].tolist()
        torch.testing.assert_close(probs[row], plain[row], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(probs[1, 0], plain[1, 0], rtol=2e-5, atol=1e-9)
    squared = plain[2, 0] ** 2
    torch.testing.assert_close(probs[2, 0], squared / squared.sum(), rtol=2e-5, atol=1e-9)


def test_a_cold_row_is_still_a_distribution() -> None:
    weights, logits, first = case(2, 2, 2, 50, torch.float32)
    tokens, probs, _ = draft_chain(weights, logits, first, Sampling(torch.full((2,), 0.01, device=DEVICE)))
    assert tokens.tolist() == reference(weights, logits, first)[0].tolist()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 1, device=DEVICE))


def test_seeds_repeat_and_differ() -> None:
    made = case(8, 4, 2, 60, torch.float32)
    heat = Sampling(torch.ones(8, device=DEVICE))
    ids, zeros = torch.randperm(900, device=DEVICE)[:60], torch.zeros(8, dtype=torch.int64, device=DEVICE)
    runs = []
    for seed in (1, 1, 2):
        sampling = heat._replace(seeds=zeros + seed, positions=zeros)
        runs.append(draft_chain(*made, sampling, ids, with_probs=False)[0].tolist())
        assert runs[-1] == reference(*made, sampling, ids)[0].tolist()
    assert runs[0] == runs[1] != runs[2]
