# SPDX-License-Identifier: Apache-2.0
"""Collecting positions of answers: Triton against numpy, to the bit."""

import pytest
import torch
from interpreter import DEVICE

from vllm_ppd.kernels import answers_triton
from vllm_ppd.kernels.answers import WINDOWS, Kept, Verified, collect
from vllm_ppd.kernels.lookup import Texts

ROWS = 9
FOLLOWING = 4
RING = 24
HELD = 6
WIDTH = 1030


def on(device: str, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [part.to(device, copy=True) for part in parts]


@pytest.mark.parametrize("at_once", [2, pytest.param(16, marks=pytest.mark.full)])
def test_is_the_reference(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Through a whole ring, and until no more is held out."""
    monkeypatch.setattr(answers_triton, "REQUESTS", at_once)
    torch.manual_seed(0)
    slots = RING + HELD
    tokens = torch.zeros(slots, FOLLOWING, dtype=torch.int64)
    expected = Kept(
        torch.zeros(ROWS, WINDOWS * FOLLOWING, WIDTH),
        torch.tensor([2, 1, 4, 3, 9, 1 << 40, 5, 6, 7]),
        torch.arange(ROWS) % 2,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(slots, 2, WIDTH),
        tokens,
    )
    lengths = (expected.first.clamp(max=8) + 1).int()
    texts = Texts(torch.randint(99, (ROWS, 150), dtype=torch.int32), lengths)
    kept = Kept(*on(DEVICE, expected))
    for _ in range(10):
        rows = torch.randperm(ROWS)[: ROWS - 2].int()
        emitted = torch.randint(FOLLOWING + 1, rows.shape, dtype=torch.int32)
        rejected = torch.randint(3, rows.shape, dtype=torch.int32)
        scheduled = emitted + rejected + (emitted == 0)
        starts = torch.zeros(ROWS + 3, dtype=torch.int32)
        starts[1 : len(rows) + 1] = scheduled.cumsum(0)
        before = lengths[rows.long()] - 1
        positions = [
            torch.arange(start, start + count)
            for start, count in zip(
                before.tolist(), scheduled.tolist(), strict=True
            )
        ]
        hidden = torch.randn(int(scheduled.sum()), WIDTH)
        step = Verified(
            rows, starts, emitted, rejected, torch.cat(positions), hidden
        )
        collect(step, texts, expected, HELD)
        answers_triton.collect(
            Verified(*on(DEVICE, step)), Texts(*on(DEVICE, texts)), kept, HELD
        )
        for ours, theirs in zip(kept, expected, strict=True):
            assert ours.cpu().equal(theirs)
        lengths[rows.long()] += emitted
    seen, held = expected.counts.tolist()
    assert seen > RING and held == HELD
