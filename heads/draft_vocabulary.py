# SPDX-License-Identifier: Apache-2.0
"""Draft vocabularies: which tokens they hold, and how many.

Most text consists of few tokens: drafting only the most frequent ones loses few drafts,
and saves reading the LM head's other rows (FR-Spec drafts from a quarter of a
vocabulary of 128K).
"""

import torch

LEAST = 1024  # a smaller one saves nothing more
GRAIN = 64  # sizes are multiples of it, which suits matrix products
# Shares of the text
ALMOST_ALL = 0.99
MOST = 0.9


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The ids of the most frequent tokens, from counts [vocabulary]: [size] int64, ascending."""
    return counts.double().topk(size).indices.sort().values


def columns(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The index of each token of the vocabulary among some token ids, -1 if it is not
    one: [vocabulary] int64.
    """
    places = torch.full(
        (vocab_size,), -1, dtype=torch.int64, device=token_ids.device
    )
    places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return places


def covered(counts: torch.Tensor) -> torch.Tensor:
    """Share of the text that the 1, 2, ... most frequent tokens make up: [vocabulary] float64."""
    descending = counts.double().sort(descending=True).values
    return descending.cumsum(0) / descending.sum().clamp(min=1)


def first_guess(counts: torch.Tensor) -> int | None:
    """The recommended size before calibration, from the training text alone.

    It is the smallest that covers 99 % of the text, and at most a quarter of the
    vocabulary; None, the whole one, where that would leave out more than a tenth of the
    text.
    """
    share = covered(counts)
    enough = int((share < ALMOST_ALL).sum()) + 1
    size = max(LEAST, _round_up(min(enough, len(counts) / 4)))
    return size if size < len(counts) and float(share[size - 1]) >= MOST else None


def _round_up(size: float) -> int:
    return -int(-size // GRAIN) * GRAIN
