# SPDX-License-Identifier: Apache-2.0
"""Softmax over a weighted sample of a large vocabulary, for losses that would else read every row of the LM head.

The most frequent tokens and those of the batch are always there; others are drawn uniformly, and each of them stands
for as many as were left out (a stratified estimate of the partition function, unbiased before its logarithm). The
weight is a shift of the logit, so that any loss of logits takes the sample in place of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_ppd.heads.draft_vocabulary import columns, most_frequent


class Vocabulary(NamedTuple):
    """What a loss reads: some rows of the LM head."""

    unembedding: torch.Tensor  # [tokens, hidden]
    bias: torch.Tensor | None  # [tokens]: the LM head's own, and the logarithm of each token's weight
    columns: torch.Tensor | None = None  # [vocabulary] int64: where a token stands, -1 outside (None: all, in order)
    weights: torch.Tensor | None = None  # [tokens] float32: how many tokens each one stands for (None: itself)

    def place(self, tokens: torch.Tensor) -> torch.Tensor:
        """The columns of tokens of the batch."""
        return tokens if self.columns is None else self.columns[tokens]

    def weighted(self, placed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Values of tokens at their columns `placed`, as of all that each stands for; 0 outside (-1).

        A sum of them over a row's tokens is an unbiased estimate of the sum over the vocabulary.
        """
        return values if self.weights is None else values * self.weights[placed.clamp(min=0)] * (placed >= 0)


class VocabularySample:
    """Draws a vocabulary for each batch.

    Args:
        counts: [vocabulary] how often each token occurs in the data.
        size: tokens of a sample, about; half of them are the most frequent ones.
    """

    def __init__(self, counts: torch.Tensor, size: int, device: torch.device) -> None:
        self.size, self.vocab_size = size, len(counts)
        self.frequent = most_frequent(counts, min(size // 2, len(counts))).to(device)

    def draw(self, unembedding: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor) -> Vocabulary:
        """A sample that has all of the batch's tokens.

        Args:
            unembedding: [vocabulary, hidden].
            bias: [vocabulary], if there is one.
            tokens: of the batch, any shape.
        """
        certain = torch.zeros(self.vocab_size, dtype=torch.bool, device=tokens.device)
        certain[self.frequent] = True
        certain[tokens.flatten()] = True
        others = (~certain).nonzero().squeeze(1)
        drawn = min(len(others), max(self.size - int(certain.sum()), self.size // 4))
        if drawn == len(others):
            return Vocabulary(unembedding, bias)
        chosen = others[torch.randperm(len(others), device=others.device)[:drawn]]
        weights = torch.ones(self.vocab_size, device=tokens.device)
        weights[chosen] = len(others) / drawn
        ids = torch.cat([certain.nonzero().squeeze(1), chosen]).sort().values
        weights = weights[ids]
        shifts = weights.log() if bias is None else weights.log() + bias[ids].float()
        return Vocabulary(unembedding[ids], shifts.to(unembedding.dtype), columns(ids, self.vocab_size), weights)
