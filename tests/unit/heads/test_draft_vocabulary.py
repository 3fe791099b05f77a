# SPDX-License-Identifier: Apache-2.0
"""Draft vocabularies: which tokens, and how many by default."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.calibration.run import save_recommended
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.draft_vocabulary import columns, covered, first_guess, most_frequent
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.planning import recommend


def zipf(vocab: int, power: float) -> torch.Tensor:
    """Counts that fall as rank^-power, ids shuffled."""
    counts = (1e9 * torch.arange(1, vocab + 1, dtype=torch.float64) ** -power).long()
    return counts[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]


def test_most_frequent_and_where_they_stand() -> None:
    ids = most_frequent(torch.tensor([5, 0, 9, 7, 1], dtype=torch.int32), 3)
    assert ids.tolist() == [0, 2, 3]
    assert columns(ids, 5).tolist() == [0, -1, 1, 2, -1]
    # float32 would not tell these apart.
    assert most_frequent(torch.tensor([2**30, 2**30 + 1, 2**30 + 2]), 1).tolist() == [2]


def test_covered_counts_down_from_the_most_frequent() -> None:
    torch.testing.assert_close(
        covered(torch.tensor([1, 6, 3])),
        torch.tensor([0.6, 0.9, 1.0], dtype=torch.float64),
    )


def test_first_guess() -> None:
    steep = zipf(32_768, 2.0)
    assert first_guess(steep) == 1024, "covers 99 % by far, and is the least"
    middling = zipf(32_768, 1.15)
    assert first_guess(middling) == 8192, "99 % would take more than a quarter"
    assert float(covered(middling)[8191]) < 0.99
    between = zipf(32_768, 1.5)
    size = first_guess(between)
    assert size is not None
    assert 1024 < size < 8192
    assert (
        float(covered(between)[size - 1]) >= 0.99 > float(covered(between)[size - 65])
    )
    assert first_guess(torch.ones(32_768, dtype=torch.int64)) is None
    assert first_guess(zipf(320, 2.0)) is None


@pytest.mark.parametrize(("accepted_short", "expected"), [(0.59, 8192), (0.45, None)])
def test_calibration_takes_the_vocabulary_that_pays(
    accepted_short: float, expected: int | None
) -> None:
    """A fifth of a pass is the LM head: 0.15 passes saved against the drafts lost."""
    config = CPConfig(
        verifier="m",
        positions=2,
        rank=2,
        num_speculative_tokens=1,
        token_counts=True,
        target=TargetLayers(
            model_type="llama", hidden_size=8, vocab_size=32_768, num_hidden_layers=4
        ),
    )
    lengths = {"whole": 1.7, "short": 1 + accepted_short}
    by: dict[str, Any] = {
        name: [{"length": length, "drafted": 9, "cycles": 9}]
        for name, length in lengths.items()
    }
    parts = {
        "timing": {
            "seconds": {"layer": {1: 1.0}, "lm_head": {1: 1.0}},
            "lm_head_share": 0.2,
        },
        "acceptance": {
            name: {"by_drafts": by["whole"]} for name in ("greedy", "T 0.8")
        },
        "vocabulary": {8192: {"covers": 0.95, "by_drafts": by["short"]}},
    }
    chosen = recommend(config, config.parts.model_validate(parts))
    assert chosen["draft_vocab_size"] == expected
    assert chosen["predicted_speedup"] == pytest.approx(
        max(1.7 / 1.2, (1 + accepted_short) / 1.05), abs=1e-3
    )


def test_recommendation_reaches_the_config(tmp_path: Path) -> None:
    config = CPConfig(
        verifier="m",
        positions=2,
        rank=2,
        num_speculative_tokens=1,
        token_counts=True,
        target=TargetLayers(
            model_type="llama", hidden_size=8, vocab_size=64, num_hidden_layers=4
        ),
    )
    for size in (32, None):
        chosen = {"draft_vocab_size": size, "predicted_speedup": 2.0}
        save_recommended(str(tmp_path), config, chosen)
        assert load_config(tmp_path).draft_vocab_size == size
