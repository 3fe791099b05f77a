# SPDX-License-Identifier: Apache-2.0
"""Draft vocabularies: which tokens, and how many by default."""

import torch

from vllm_ppd.heads.module import (
    columns,
    first_guess,
    most_frequent,
)


def zipf(vocab: int, power: float) -> torch.Tensor:
    """Counts that fall as rank^-power, ids shuffled."""
    counts = (
        1e9 * torch.arange(1, vocab + 1, dtype=torch.float64) ** -power
    ).long()
    return counts[
        torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    ]


def test_most_frequent_and_where_they_stand() -> None:
    ids = most_frequent(torch.tensor([5, 0, 9, 7, 1], dtype=torch.int32), 3)
    assert ids.tolist() == [0, 2, 3]
    assert columns(ids, 5).tolist() == [0, -1, 1, 2, -1]
    # float32 would not tell these apart.
    assert most_frequent(
        torch.tensor([2**30, 2**30 + 1, 2**30 + 2]), 1
    ).tolist() == [2]


def test_first_guess() -> None:
    assert first_guess(zipf(32_768, 2.0)) == 1024, "covers 99 % by far: the least"
    assert first_guess(zipf(32_768, 1.15)) == 8192, (
        "99 % would take more: a quarter"
    )
    between = zipf(32_768, 1.5)
    size = first_guess(between)
    assert size is not None and 1024 < size < 8192
    share = between.sort(descending=True).values.cumsum(0) / between.sum()
    assert share[size - 1] >= 0.99 > share[size - 65]
    assert first_guess(torch.ones(32_768, dtype=torch.int64)) is None
    assert first_guess(zipf(320, 2.0)) is None
