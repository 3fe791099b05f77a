# SPDX-License-Identifier: Apache-2.0
"""Sampling that every way of drafting shares: temperatures, draws, and the q(x) that rejection sampling is given."""

from __future__ import annotations

import torch

GREEDY_BELOW = 1e-5  # temperature, as vLLM's sampler has it
INVALID = -1  # in place of a draft: what it was taken from is not a distribution
SUM_TOLERANCE = 1e-3  # float32 sums of 2^18 probabilities are off by less


def is_greedy(temperature: torch.Tensor) -> torch.Tensor:
    """Rows that take the best token: bool, of the shape of the temperatures."""
    return temperature < GREEDY_BELOW


def divisor(temperature: torch.Tensor) -> torch.Tensor:
    """What logits are divided by: the temperature [rows], 1 where it is greedy; [rows, 1] for a row of logits each."""
    return torch.where(is_greedy(temperature), 1.0, temperature).unsqueeze(-1)


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """An index in proportion to the weights [..., entries], which need not sum to 1: [...] int64.

    The winner of an exponential race is a sample, without multinomial's wait for the device; tensor-parallel ranks,
    whose generators are in the same state, draw the same. An entry of weight 0 is drawn only if all are 0.
    """
    return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(dim=-1)


def drawn_from(
    probs: torch.Tensor,  # [rows, ..., entries]
    index: torch.Tensor,  # [rows, ...] int64, the entries that were taken
    greedy: torch.Tensor,  # [rows] bool
) -> torch.Tensor:
    """q(x) of taken entries: the probabilities where they were drawn, one-hot in rows that took the best."""
    one_hot = torch.zeros_like(probs).scatter_(-1, index.unsqueeze(-1), 1.0)
    return torch.where(greedy.view(-1, *[1] * (probs.dim() - 1)), one_hot, probs)


def are_distributions(probs: torch.Tensor) -> torch.Tensor:
    """Whether probabilities [..., entries] are not negative and sum to 1, which NaN and infinities do not: [...] bool.

    Two reads of them: 8 bytes an entry in float32, where a softmax and a draw move about 60.
    """
    return (probs.amin(dim=-1) >= 0) & ((probs.sum(dim=-1) - 1).abs() < SUM_TOLERANCE)
