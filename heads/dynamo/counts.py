# SPDX-License-Identifier: Apache-2.0
"""Stored co-occurrence counts in numpy: a check that a corpus can have them, and eq. 3
for each n-gram.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

KEYS = 2**63  # keys are below it
MOST_COUNTS = np.iinfo(np.int32).max  # counts are stored with 31 bits


class Digits(NamedTuple):
    """What the digits of a key stand for: x_1 B^(n-1) + ... + x_n is the key of an
    n-gram with digits x_i.
    """

    base: int  # B
    # [digits] int64, the token of each digit, ascending; the digit B - 1 stands for all
    # others, if there are any
    tokens: np.ndarray

    def columns(self, vocab_size: int) -> np.ndarray | None:
        """The digit of each token: [vocabulary] int64; None if it is the token's id."""
        if len(self.tokens) == vocab_size:
            return None
        columns = np.full(vocab_size, self.base - 1)
        columns[self.tokens] = np.arange(len(self.tokens))
        return columns


def digits_of(unigram: np.ndarray, order: int) -> Digits:
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


def eq_3(
    unigram: np.ndarray,
    totals: np.ndarray,
    order: int,
    keys: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """p^(x_1..x_n) / prod p^(x_i) of each n-gram that was counted.

    Args:
        unigram: [vocabulary] counts.
        totals: [orders] n-grams of each order, from 1, that the corpus has.
        order: n.
        keys: [entries] int64, of Digits.
        counts: [entries]

    Returns:
        [entries] float32, infinite where it does not fit.
    """
    base, tokens = digits_of(unigram, len(totals))
    single = np.ones(base)
    single[: len(tokens)] = unigram[tokens] / max(int(totals[0]), 1)
    single[single == 0] = (
        1.0  # no n-gram contains these tokens, unless the counts are damaged
    )
    ratio = counts / max(int(totals[order - 1]), 1)
    rest = keys
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for _ in range(order):
            ratio = ratio / single[rest % base]
            rest = rest // base
        return ratio.astype(np.float32)


def check_counts(tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse counts that no corpus can have, from which a mask would be arbitrary.

    Args:
        tensors: of a checkpoint, by name.

    Raises:
        ValueError: if counts are negative or more than there are n-grams, if keys are
            out of range, not ascending or not unique, or if an entry of eq. 3 is not
            finite.
    """
    unigram, totals = (
        tensors[f"cooccurrence.{name}"].astype(np.int64)
        for name in ("unigram", "totals")
    )
    keys, counts = (
        {
            n: tensors[f"cooccurrence.{n}.{name}"].astype(np.int64)
            for n in range(2, len(totals) + 1)
        }
        for name in ("keys", "counts")
    )
    for order, numbers in {1: unigram, **counts}.items():
        # Stored counts are clamped to 31 bits, so float64 can sum any number of them.
        if len(numbers) and (
            int(numbers.min()) < 0
            or float(numbers.sum(dtype=np.float64)) > float(totals[order - 1])
        ):
            raise ValueError(
                f"the counts of {order}-grams are negative, or their sum is more than "
                "cooccurrence.totals"
            )
    base, _ = digits_of(unigram, len(totals))
    for order, some in keys.items():
        ascending = bool((some[1:] > some[:-1]).all())
        if not ascending or (
            len(some) and not 0 <= int(some[0]) <= int(some[-1]) < base**order
        ):
            raise ValueError(
                f"cooccurrence.{order}.keys are not ascending keys of {order}-grams"
            )
    if not all(
        np.isfinite(eq_3(unigram, totals, n, some, counts[n])).all()
        for n, some in keys.items()
    ):
        raise ValueError("the co-occurrence counts give a mask that is not finite")
