# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: both forms against a search in plain Python."""

import pytest
import torch

from vllm_ppd.kernels.lookup import Texts
from vllm_ppd.kernels.lookup import look_up as reference
from vllm_ppd.kernels.lookup_triton import look_up

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    for form, device in ((reference, "cpu"), (look_up, DEVICE)):
        matched = torch.full(
            (len(rows),),
            -7,
            dtype=torch.int32,
            device=device,
        )
        drafts = torch.full((len(rows), K), -7, device=device)
        texts = Texts(token_ids.to(device), lengths.to(device))
        form(
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
