# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: both forms against plain Python."""

import pytest
import torch
from interpreter import DEVICE

from vllm_ppd.kernels import lookup, lookup_triton
from vllm_ppd.kernels.lookup import Texts

K = 5
LONGEST = 4


def searched(
    text: list[int], shortest: int, window: int
) -> tuple[int, list[int] | None]:
    """(Tokens of the longest, then latest match; what follows it, again and again)."""
    text = text[-window:]
    for length in range(LONGEST, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                followed = text[end:]
                return length, [followed[i % len(followed)] for i in range(K)]
    return 0, None


@pytest.mark.parametrize("window", [64, 12])
@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_is_a_search(shortest: int, window: int) -> None:
    generator = torch.Generator().manual_seed(shortest)
    token_ids = torch.randint(
        0, 4, (12, 70), generator=generator, dtype=torch.int32
    )
    token_ids[3] = 7  # one token again and again
    token_ids[4] = torch.arange(70)  # none twice
    lengths = torch.randint(
        5,
        60,
        (12,),
        generator=generator,
        dtype=torch.int32,
    )
    lengths[5] = 1
    rows = torch.tensor([3, 4, 5, -1, 0, 7, 11, 1, 2, 6])
    expected = [
        searched(token_ids[row, : lengths[row]].tolist(), shortest, window)
        if row >= 0
        else (0, None)
        for row in rows.tolist()
    ]
    assert {length for length, _ in expected} >= {0, LONGEST}
    for forms, device in ((lookup, "cpu"), (lookup_triton, DEVICE)):
        matched = torch.full(
            (len(rows),),
            -7,
            dtype=torch.int32,
            device=device,
        )
        drafts = torch.full((len(rows), K), -7, device=device)
        texts = Texts(token_ids.to(device), lengths.to(device))
        forms.look_up(
            texts,
            rows.to(device),
            shortest,
            LONGEST,
            window,
            matched,
            drafts,
        )
        assert matched.tolist() == [length for length, _ in expected]
        for made, (_, followed) in zip(drafts.tolist(), expected, strict=True):
            assert followed is None or made == followed


def test_drafts_are_judged_by_what_the_texts_became() -> None:
    """Rows join, end and sleep; each has a trial at a time, of matches only."""
    generator = torch.Generator().manual_seed(0)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    token_ids = numbers(2, 9, 90).int()
    lengths = numbers(9, 9).int() + 1
    steps = []
    pending: dict[int, tuple[int, int, torch.Tensor]] = {}
    expected = [0] * 8
    compared = 0
    for step in range(24):
        lengths = lengths + numbers(K + 2, 9).int() * (lengths < 60)
        rows = torch.randperm(9, generator=generator)[: 5 + step % 3]
        rows[1] = -1
        kinds = numbers(8, len(rows))
        both = numbers(2, 2, len(rows), K)
        steps.append((lengths, rows, kinds, both))
        for place, row in enumerate(rows.tolist()):
            if row < 0:
                continue
            length = int(lengths[row])
            if row in pending:
                began, kind, drafts = pending[row]
                if length - began < K:
                    continue
                right = drafts == token_ids[row, began : began + K]
                ours, theirs = right.long().cumprod(1).sum(1).tolist()
                expected[kind] += ours - theirs
                compared += ours != theirs
                del pending[row]
            kind = int(kinds[place])
            if kind > 1:
                pending[row] = (length, kind, both[:, place])
    assert compared > 20 and expected[:2] == [0, 0]
    for forms, device in ((lookup, "cpu"), (lookup_triton, DEVICE)):
        gains = torch.zeros(8, dtype=torch.int32, device=device)
        began = torch.zeros(10, dtype=torch.int32, device=device)
        trials = torch.zeros(10, 1 + 2 * K, dtype=torch.int64, device=device)
        texts = token_ids.to(device)
        for lengths, rows, kinds, both in steps:
            forms.judge(
                Texts(texts, lengths.to(device)),
                rows.to(device),
                torch.cat([kinds[:, None], *both], dim=1).to(device),
                began,
                trials,
                gains,
            )
        assert gains.tolist() == expected
