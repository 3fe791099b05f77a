# SPDX-License-Identifier: Apache-2.0
"""The chain of CP drafts: Triton against torch, with the same random numbers."""

from typing import Any

import pytest
import torch
from interpreter import DEVICE, seeded

from vllm_ppd.kernels import cp_mixture_triton
from vllm_ppd.kernels.cp_mixture import draft_chain as reference
from vllm_ppd.kernels.cp_mixture_triton import draft_chain
from vllm_ppd.kernels.sampling import INVALID

torch.set_default_device(DEVICE)


def case(
    rows: int,
    positions: int,
    rank: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Log weights, logits and first tokens; the last row's first token is unknown."""
    torch.manual_seed(rows + vocab)
    weights = torch.randn(rows, rank).log_softmax(-1)
    logits = (
        3
        * torch.randn(
            rows,
            positions,
            rank,
            vocab,
        )
    ).to(dtype)
    first = torch.randint(vocab, (rows,))
    first[-1] = -1
    return weights, logits, first


def same(*arguments: Any) -> torch.Tensor:
    """The tokens of both, which are equal, as are the experts' weights after the last."""
    tokens, weights = draft_chain(*arguments)
    expected_tokens, expected_weights = reference(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(
        weights, expected_weights, rtol=1e-4, atol=1e-5, equal_nan=True
    )
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 4, 3, 257),
        (2, 2, 1, 5000),
        (1, 3, 5, 1),
        (1, 2, 2, 151_936),
    ],
)
def test_greedy_chains(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu" and shape[-1] > 5000:
        # The interpreter counts operations, not numbers
        monkeypatch.setattr(cp_mixture_triton, "BLOCK_V", 8192)
    weights, logits, first = case(*shape, dtype)
    kept = weights.clone()
    same(weights, logits, first)
    assert torch.equal(weights, kept)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(
    "limits",
    [
        None,
        (),
        ([4] * 3, [0.9] * 3),
    ],
)
def test_chains_without_a_first_token(positions: int, limits: Any) -> None:
    """Every position is drafted, the first one from the weights as they are."""
    weights, logits, _ = case(
        3,
        positions,
        3,
        5000,
    )
    sampling = None if limits is None else seeded([0.0, 0.7, 1.2], *limits)
    same(
        weights,
        logits,
        None,
        sampling,
    )


def test_positions_in_turn_are_the_chain() -> None:
    weights, logits, _ = case(
        3,
        3,
        3,
        70,
    )
    tokens = same(weights, logits, None)
    for position in range(3):
        token, weights = draft_chain(
            weights, logits[:, position : position + 1], None
        )
        assert torch.equal(token[:, 0], tokens[:, position])


def test_a_slice_of_the_vocabulary() -> None:
    weights, logits, first = case(
        3,
        3,
        3,
        300,
        torch.bfloat16,
    )
    same(weights, logits[..., :200], first % 200)


def test_ties_masks_and_nan() -> None:
    weights, logits, first = case(
        5,
        3,
        2,
        40,
    )
    logits[0] = 1.0  # every token alike
    logits[1, :, :, 3:] = float("-inf")
    first[1] = 30  # ruled out by every expert
    logits[2, 1, 1] = float("nan")
    logits[3, :, 0, 7] = float("-inf")
    weights[3] = torch.tensor([0.0, float("-inf")])
    tokens, _ = draft_chain(weights, logits, first)
    assert torch.equal(tokens, reference(weights, logits, first)[0])
    assert tokens[0].tolist() == [0, 0]
    assert tokens[2, 0].item() == INVALID
    assert (tokens[1] < 3).all()


def test_greedy_and_cold_rows_beside_sampling_ones() -> None:
    arguments = case(
        4,
        3,
        3,
        70,
    )
    greedy, _ = reference(*arguments)
    tokens, _ = draft_chain(*arguments, seeded([0.0, 1.0, 0.5, 0.9e-5]))
    assert torch.equal(tokens[[0, 3]], greedy[[0, 3]])
    assert torch.equal(same(*arguments, seeded([0.001] * 4)), greedy)


def test_seeds_repeat_and_differ() -> None:
    arguments = case(
        3,
        4,
        2,
        60,
    )
    ids = torch.randperm(900)[:60]
    runs = []
    for seed in (1, 1, 2):
        sampling = seeded([1.0] * 3)._replace(seeds=torch.full((3,), seed))
        runs.append(same(*arguments, sampling, ids).tolist())
    assert runs[0] == runs[1] != runs[2]
