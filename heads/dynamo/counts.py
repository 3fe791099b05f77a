# SPDX-License-Identifier: Apache-2.0
"""Stored co-occurrence counts in numpy: a check that a corpus can have them, and eq. 3 for each n-gram."""

from collections.abc import Mapping

import numpy as np


def eq_3(unigram: np.ndarray, totals: np.ndarray, order: int, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """p^(x_1..x_n) / prod p^(x_i) of each n-gram that was counted.

    Args:
        unigram: [vocabulary] counts.
        totals: [orders] n-grams of each order, from 1, that the corpus has.
        order: n.
        keys: [entries] int64, x_1 V^(n-1) + ... + x_n.
        counts: [entries]

    Returns:
        [entries] float32, infinite where it does not fit.
    """
    single = unigram / max(int(totals[0]), 1)
    single[unigram == 0] = 1.0  # no n-gram contains these tokens, unless the counts are damaged
    ratio, rest = counts / max(int(totals[order - 1]), 1), keys
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for _ in range(order):
            ratio, rest = ratio / single[rest % len(unigram)], rest // len(unigram)
        return ratio.astype(np.float32)


def check_counts(tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse counts that no corpus can have, from which a mask would be arbitrary.

    Args:
        tensors: of a checkpoint, by name.

    Raises:
        ValueError: if counts are negative or more than there are n-grams, if keys are out of range, not ascending or
            not unique, or if an entry of eq. 3 is not finite.
    """
    unigram, totals = (tensors[f"cooccurrence.{name}"].astype(np.int64) for name in ("unigram", "totals"))
    keys, counts = (
        {n: tensors[f"cooccurrence.{n}.{name}"].astype(np.int64) for n in range(2, len(totals) + 1)}
        for name in ("keys", "counts")
    )
    for order, numbers in {1: unigram, **counts}.items():
        # Stored counts are clamped to 31 bits, so float64 can sum any number of them.
        if len(numbers) and (int(numbers.min()) < 0 or float(numbers.sum(dtype=np.float64)) > float(totals[order - 1])):
            raise ValueError(f"the counts of {order}-grams are negative, or their sum is more than cooccurrence.totals")
    for order, some in keys.items():
        ascending = bool((some[1:] > some[:-1]).all())
        if not ascending or (len(some) and not 0 <= int(some[0]) <= int(some[-1]) < len(unigram) ** order):
            raise ValueError(f"cooccurrence.{order}.keys are not ascending keys of {order}-grams")
    if not all(np.isfinite(eq_3(unigram, totals, n, some, counts[n])).all() for n, some in keys.items()):
        raise ValueError("the co-occurrence counts give a mask that is not finite")
