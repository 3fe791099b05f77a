# SPDX-License-Identifier: Apache-2.0
"""Sparse co-occurrence counts of a corpus, and DynaMo's eq. 3 for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from vllm_ppd.kernels.joint import Ngrams

FLUSH = 1 << 22  # n-grams collected before they are merged into the counts
KEYS = 2**63  # keys are below it
MOST_COUNTS = np.iinfo(np.int32).max  # counts are stored with 31 bits


class Digits(NamedTuple):
    """What the digits of a key stand for: x_1 B^(n-1) + ... + x_n is the key of an
    n-gram with digits x_i.
    """

    base: int  # B
    # [digits] int64, the token of each digit, ascending; the digit B - 1 stands for all
    # others, if there are any
    tokens: ndarray

    def columns(self, vocab_size: int) -> ndarray:
        """The digit of each token: [vocabulary] int64."""
        columns = np.full(vocab_size, self.base - 1)
        columns[self.tokens] = np.arange(len(self.tokens))
        return columns


def digits_of(unigram: ndarray, order: int) -> Digits:
    """The digits of keys up to an order: all tokens, or so many of the most frequent
    that the keys fit 63 bits.

    The n-grams of other tokens are not counted, as those that are rare are not kept: at
    order 4, these are the tokens beyond the 55,107 most frequent.

    Args:
        unigram: [vocabulary] counts.
        order: the highest n.
    """
    vocab_size = len(unigram)
    if vocab_size**order < KEYS:
        return Digits(vocab_size, np.arange(vocab_size))
    base = round(KEYS ** (1 / order)) + 1
    while base**order >= KEYS:
        base -= 1
    # Equal counts go to the lower id, so that the digits are the same everywhere.
    frequent = np.argsort(
        -np.minimum(unigram.astype(np.int64), MOST_COUNTS), kind="stable"
    )[: base - 1]
    return Digits(base, np.sort(frequent))


@dataclass
class CoOccurrence:
    """Counts of n-grams of order 2 to n by sorted keys (of Digits), and of single
    tokens.

    An n-gram that was never counted has probability 0, hence mask 0. So have rare ones
    that were pruned by the bound on the number of entries.
    """

    unigram: ndarray  # [vocabulary] counts
    # [orders] number of the corpus's n-grams of each order from 1
    totals: ndarray
    keys: dict[int, ndarray]  # order -> [entries] int64, ascending
    counts: dict[int, ndarray]  # order -> [entries] int64

    @cached_property
    def digits(self) -> Digits:
        """The digits of the keys."""
        return digits_of(self.unigram, len(self.totals))

    @classmethod
    def from_tokens(
        cls,
        chunks: Iterable[ndarray],
        unigram: ndarray,
        order: int,
        max_entries: int,
    ) -> CoOccurrence:
        """Count the n-grams of a stream of documents; no n-gram crosses the end of a
        chunk.

        Args:
            chunks: token ids of a document each.
            unigram: [vocabulary] counts of the same tokens. Where V^order does not fit
                63 bits, n-grams of the rarest tokens are not counted.
            order: the highest n.
            max_entries: keep so many of the most frequent n-grams an order. Memory is
                bounded by a multiple of it, since rare ones are dropped along the way,
                so late and rare n-grams may be undercounted.
        """
        digits = digits_of(unigram, order)
        columns = digits.columns(len(unigram))
        tables = {n: _Table(max_entries) for n in range(2, order + 1)}
        totals = np.zeros(order, dtype=np.int64)
        totals[0] = unigram.sum(dtype=np.int64)
        for chunk in chunks:
            numbers = columns[chunk]
            is_counted = numbers < len(digits.tokens)
            keys = numbers
            counted = is_counted
            for n, table in tables.items():
                keys = keys[:-1] * digits.base + numbers[n - 1 :]
                counted = counted[:-1] & is_counted[n - 1 :]
                totals[n - 1] += len(keys)
                table.add(keys[counted])
        for table in tables.values():
            table.merge()
        return cls(
            unigram,
            totals,
            {n: table.keys for n, table in tables.items()},
            {n: table.counts for n, table in tables.items()},
        )

    def ratios(self, order: int) -> ndarray:
        """p^(x_1..x_n) / prod p^(x_i) of each n-gram that was counted (eq. 3).

        Returns:
            [entries] float32, infinite where it does not fit.
        """
        base, tokens = self.digits
        single = np.ones(base)
        totals = np.maximum(self.totals, 1)
        single[: len(tokens)] = self.unigram[tokens] / totals[0]
        # No n-gram contains these tokens, unless the counts are damaged.
        single[single == 0] = 1.0
        ratio = self.counts[order] / totals[order - 1]
        rest = self.keys[order]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for _ in range(order):
                ratio = ratio / single[rest % base]
                rest = rest // base
            return ratio.astype(np.float32)

    @cached_property
    def ngrams(self) -> Ngrams:
        """Keys and eq. 3 of all orders."""
        keys = []
        ratios = []
        bounds = [0]
        for order, of_order in sorted(self.keys.items()):
            keys.append(np.append(of_order, np.iinfo(np.int64).max))
            ratios.append(np.append(self.ratios(order), np.float32(0)))
            bounds.append(bounds[-1] + len(of_order) + 1)
        vocab_size = len(self.unigram)
        columns = None
        if len(self.digits.tokens) < vocab_size:
            columns = torch.from_numpy(self.digits.columns(vocab_size))
        return Ngrams(
            torch.from_numpy(np.concatenate(keys)),
            torch.from_numpy(np.concatenate(ratios)),
            torch.tensor(bounds),
            tuple(bounds),
            self.digits.base,
            vocab_size,
            columns,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, in the smallest types that hold them."""

        def small(counts: ndarray) -> torch.Tensor:
            return torch.from_numpy(
                np.minimum(counts, MOST_COUNTS).astype(np.int32)
            )

        tensors = {
            "cooccurrence.unigram": small(self.unigram),
            "cooccurrence.totals": torch.from_numpy(self.totals),
        }
        for n, keys in self.keys.items():
            fits = self.digits.base**n <= MOST_COUNTS
            dtype = torch.int32 if fits else torch.int64
            tensors[f"cooccurrence.{n}.keys"] = torch.from_numpy(keys).to(dtype)
            tensors[f"cooccurrence.{n}.counts"] = small(self.counts[n])
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any]) -> CoOccurrence | None:
        """Build from a checkpoint's tensors or arrays; None if it has no counts."""
        if "cooccurrence.unigram" not in tensors:
            return None

        def read(name: str) -> ndarray:
            return np.asarray(tensors[f"cooccurrence.{name}"]).astype(np.int64)

        totals = read("totals")
        orders = range(2, len(totals) + 1)
        return cls(
            read("unigram"),
            totals,
            {n: read(f"{n}.keys") for n in orders},
            {n: read(f"{n}.counts") for n in orders},
        )


class _Table:
    """Sorted keys and counts that grow by batches, pruned to a multiple of a bound."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.size = 0
        self.keys = np.zeros(0, dtype=np.int64)
        self.counts = np.zeros(0, dtype=np.int64)
        self.waiting: list[ndarray] = []

    def add(self, keys: ndarray) -> None:
        self.waiting.append(keys)
        self.size += len(keys)
        if self.size >= FLUSH:
            self.merge(8)

    def merge(self, times: int = 1) -> None:
        """Count everything that was added, and prune to a multiple of the bound."""
        new = np.ones(self.size, dtype=np.int64)
        counts = np.concatenate([self.counts, new])
        keys, inverse = np.unique(
            np.concatenate([self.keys, *self.waiting]), return_inverse=True
        )
        self.keys = keys
        self.counts = np.bincount(inverse, counts, len(keys)).astype(np.int64)
        self.waiting = []
        self.size = 0
        # Keep the most frequent; ties go to the lower key, so that the result is the same
        # everywhere.
        frequent = np.argsort(-self.counts, kind="stable")
        best = np.sort(frequent[: times * self.max_entries])
        self.keys = self.keys[best]
        self.counts = self.counts[best]
