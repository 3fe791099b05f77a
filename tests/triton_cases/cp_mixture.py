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


def case(
    rows: int, positions: int, rank: int, vocab: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Log weights, logits and first tokens; the last row's first token is unknown."""
    generator = torch.Generator().manual_seed(rows + vocab)
    weights = torch.randn(rows, rank, generator=generator).log_softmax(-1)
    logits = (3 * torch.randn(rows, positions, rank, vocab, generator=generator)).to(
        dtype
    )
    first = torch.randint(vocab, (rows,), generator=generator)
    first[-1] = -1
    return [tensor.to(DEVICE) for tensor in (weights, logits, first)]


def seeded(temperature: list[float], **limits: torch.Tensor) -> Sampling:
    rows = len(temperature)
    seeds = torch.arange(rows, device=DEVICE) * 977 + 5
    return Sampling(
        torch.tensor(temperature, device=DEVICE),
        **limits,
        seeds=seeds,
        positions=3 * seeds,
    )


def same(actual: Any, expected: Any) -> None:
    """Equal tokens, and equal weights of the experts after the last of them."""
    assert actual[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(
        actual[1], expected[1], rtol=1e-4, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    ("rows", "positions", "rank", "vocab"),
    [(3, 4, 3, 257), (2, 2, 1, 5000), (1, 3, 5, 1), (1, 2, 2, 151_936)],
)
def test_greedy_chains(
    dtype: torch.dtype,
    rows: int,
    positions: int,
    rank: int,
    vocab: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu" and vocab > 5000:
        # The interpreter counts operations, not numbers
        monkeypatch.setattr(cp_mixture_triton, "BLOCK_V", 8192)
    made = case(rows, positions, rank, vocab, dtype)
    kept = made[0].clone()
    same(draft_chain(*made), reference(*made))
    assert torch.equal(made[0], kept)


@pytest.mark.parametrize("positions", [1, 3])
def test_chains_without_a_first_token(positions: int) -> None:
    """Every position is drafted, the first one from the weights as they are."""
    weights, logits, _ = case(3, positions, 3, 5000, torch.float32)
    top_k = torch.full((3,), 4, device=DEVICE)
    top_p = torch.full((3,), 0.9, device=DEVICE)
    heat = [0.0, 0.7, 1.2]
    for sampling in (None, seeded(heat), seeded(heat, top_k=top_k, top_p=top_p)):
        same(
            draft_chain(weights, logits, None, sampling),
            reference(weights, logits, None, sampling),
        )


def test_positions_in_turn_are_the_chain() -> None:
    weights, logits, _ = case(3, 3, 3, 70, torch.float32)
    tokens, _ = reference(weights, logits, None)
    for position in range(3):
        expected = reference(weights, logits[:, position : position + 1], None)
        token, weights = draft_chain(weights, logits[:, position : position + 1], None)
        same((token, weights), (tokens[:, position : position + 1], expected[1]))


def test_a_slice_of_the_vocabulary() -> None:
    weights, logits, first = case(3, 3, 3, 300, torch.bfloat16)
    some = logits[..., :200]
    same(draft_chain(weights, some, first % 200), reference(weights, some, first % 200))


def test_ties_masks_and_nan() -> None:
    weights, logits, first = case(5, 3, 2, 40, torch.float32)
    logits[0] = 1.0  # every token alike
    logits[1, :, :, 3:] = float("-inf")
    first[1] = 30  # ruled out by every expert
    logits[2, 1, 1] = float("nan")
    logits[3, :, 0, 7] = float("-inf")
    weights[3] = torch.tensor([0.0, float("-inf")], device=DEVICE)
    tokens, _ = draft_chain(weights, logits, first)
    assert tokens.tolist() == reference(weights, logits, first)[0].tolist()
    assert tokens[0].tolist() == [0, 0]
    assert tokens[2, 0].item() == INVALID
    assert (tokens[1] < 3).all()


def test_greedy_and_cold_rows_beside_sampling_ones() -> None:
    weights, logits, first = case(4, 3, 3, 70, torch.float32)
    tokens, _ = draft_chain(weights, logits, first, seeded([0.0, 1.0, 0.5, 0.9e-5]))
    greedy, _ = reference(weights, logits, first)
    for row in (0, 3):
        assert tokens[row].tolist() == greedy[row].tolist()
    cold, _ = draft_chain(weights, logits, first, seeded([0.001] * 4))
    assert cold.tolist() == greedy.tolist()


def test_seeds_repeat_and_differ() -> None:
    made = case(8, 4, 2, 60, torch.float32)
    ids = torch.randperm(900, device=DEVICE)[:60]
    zeros = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    runs = []
    for seed in (1, 1, 2):
        sampling = Sampling(
            torch.ones(8, device=DEVICE), seeds=zeros + seed, positions=zeros
        )
        runs.append(draft_chain(*made, sampling, ids)[0].tolist())
        assert runs[-1] == reference(*made, sampling, ids)[0].tolist()
    assert runs[0] == runs[1] != runs[2]
