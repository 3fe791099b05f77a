# SPDX-License-Identifier: Apache-2.0
"""Sparse co-occurrence counts of a corpus, and DynaMo's eq. 3 for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch

from vllm_ppd.heads.dynamo.counts import digits_of, eq_3
from vllm_ppd.kernels.joint import Ngrams

FLUSH = 1 << 22  # n-grams collected before they are merged into the counts


class CoOccurrence:
    """Counts of n-grams of order 2 to n by sorted keys (of Digits), and of single
    tokens.

    An n-gram that was never counted has probability 0, hence mask 0. So have rare ones
    that were pruned by the bound on the number of entries.
    """

    def __init__(
        self,
        unigram: torch.Tensor,  # [vocabulary] counts
        # [orders] number of the corpus's n-grams of each order from 1
        totals: torch.Tensor,
        keys: dict[int, torch.Tensor],  # order -> [entries] int64, ascending
        counts: dict[int, torch.Tensor],  # order -> [entries]
    ) -> None:
        self.unigram = unigram
        self.totals = totals
        self.keys = keys
        self.counts = counts
        self.vocab_size = len(unigram)
        self.digits = digits_of(unigram.numpy(), len(totals))

    @classmethod
    def from_tokens(
        cls,
        chunks: Iterable[np.ndarray],
        vocab_size: int,
        order: int,
        max_entries: int | None = None,
        unigram: np.ndarray | None = None,
    ) -> CoOccurrence:
        """Count the n-grams of a stream of documents; no n-gram crosses the end of a
        chunk.

        Args:
            chunks: token ids of a document each.
            vocab_size: V.
            order: the highest n.
            max_entries: keep so many of the most frequent n-grams an order. Memory is
                bounded by a multiple of it, since rare ones are dropped along the way,
                so late and rare n-grams may be undercounted.
            unigram: [vocabulary] counts of the same tokens (None: all are as frequent).
                Where V^order does not fit 63 bits, n-grams of the rarest tokens are not
                counted.

        Raises:
            ValueError: if a token id is outside the vocabulary, or the unigram counts
                are those of other tokens.
        """
        token_counts = (
            np.zeros(vocab_size, dtype=np.int64) if unigram is None else unigram
        )
        digits = digits_of(token_counts, order)
        columns = digits.columns(vocab_size)
        tables = {n: _Table(max_entries) for n in range(2, order + 1)}
        unigram = np.zeros(vocab_size, dtype=np.int64)
        totals = np.zeros(order, dtype=np.int64)
        for chunk in chunks:
            ids = np.asarray(chunk, dtype=np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(
                    f"token id {int(ids.max())} is outside the vocabulary of "
                    f"{vocab_size}"
                )
            unigram += np.bincount(ids, minlength=vocab_size)
            totals[0] += len(ids)
            numbers = ids if columns is None else columns[ids]
            is_counted = numbers < len(digits.tokens)
            keys = numbers
            counted = is_counted
            for n in range(2, order + 1):
                keys = keys[:-1] * digits.base + numbers[n - 1 :]
                counted = counted[:-1] & is_counted[n - 1 :]
                totals[n - 1] += len(keys)
                tables[n].add(keys[counted])
        if columns is not None and not np.array_equal(
            digits_of(unigram, order).tokens, digits.tokens
        ):
            raise ValueError("the unigram counts are not those of the chunks")
        merged = {n: table.merge() for n, table in tables.items()}
        return cls(
            torch.from_numpy(unigram),
            torch.from_numpy(totals),
            *(
                {n: torch.from_numpy(table[i]) for n, table in merged.items()}
                for i in (0, 1)
            ),
        )

    @cached_property
    def ngrams(self) -> Ngrams:
        """Keys and eq. 3 of all orders."""
        keys = []
        ratios = []
        bounds = [0]
        unigram = self.unigram.numpy()
        totals = self.totals.numpy()
        for order in sorted(self.keys):
            ratio = eq_3(
                unigram,
                totals,
                order,
                self.keys[order].numpy(),
                self.counts[order].numpy(),
            )
            keys += [
                self.keys[order].long(),
                torch.tensor([torch.iinfo(torch.int64).max]),
            ]
            ratios += [torch.from_numpy(ratio), torch.zeros(1)]
            bounds.append(bounds[-1] + len(ratio) + 1)
        columns = self.digits.columns(self.vocab_size)
        return Ngrams(
            torch.cat(keys),
            torch.cat(ratios),
            torch.tensor(bounds),
            tuple(bounds),
            self.digits.base,
            self.vocab_size,
            None if columns is None else torch.from_numpy(columns),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, in the smallest types that hold them."""
        most = torch.iinfo(torch.int32).max
        tensors = {
            "cooccurrence.unigram": self.unigram.clamp(max=most).to(torch.int32),
            "cooccurrence.totals": self.totals,
        }
        for n, keys in self.keys.items():
            small = self.digits.base**n < 2**31
            tensors[f"cooccurrence.{n}.keys"] = keys.to(torch.int32) if small else keys
            tensors[f"cooccurrence.{n}.counts"] = (
                self.counts[n].clamp(max=most).to(torch.int32)
            )
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> CoOccurrence | None:
        """Build from a checkpoint's tensors; None if it has no counts."""
        if "cooccurrence.unigram" not in tensors:
            return None
        orders = range(2, len(tensors["cooccurrence.totals"]) + 1)
        return cls(
            tensors["cooccurrence.unigram"].long(),
            tensors["cooccurrence.totals"].long(),
            {n: tensors[f"cooccurrence.{n}.keys"].long() for n in orders},
            {n: tensors[f"cooccurrence.{n}.counts"].long() for n in orders},
        )


class _Table:
    """Sorted keys and counts that grow by batches, pruned to a multiple of a bound."""

    def __init__(self, max_entries: int | None) -> None:
        self.max_entries = max_entries
        self.size = 0
        self.keys = np.zeros(0, dtype=np.int64)
        self.counts = np.zeros(0, dtype=np.int64)
        self.waiting: list[np.ndarray] = []

    def add(self, keys: np.ndarray) -> None:
        self.waiting.append(keys)
        self.size += len(keys)
        if self.size >= FLUSH:
            self.merge(8)

    def merge(self, times: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Keys and counts of everything added, pruned to a multiple of the bound."""
        counts = np.concatenate([self.counts, np.ones(self.size, dtype=np.int64)])
        keys, inverse = np.unique(
            np.concatenate([self.keys, *self.waiting]), return_inverse=True
        )
        self.keys = keys
        self.counts = np.bincount(inverse, counts, len(keys)).astype(np.int64)
        self.waiting = []
        self.size = 0
        if self.max_entries is not None and len(self.keys) > times * self.max_entries:
            # Keep the most frequent; ties go to the lower key, so that the result is
            # the same everywhere.
            best = np.sort(
                np.argsort(-self.counts, kind="stable")[: times * self.max_entries]
            )
            self.keys = self.keys[best]
            self.counts = self.counts[best]
        return self.keys, self.counts
