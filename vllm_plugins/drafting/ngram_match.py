# SPDX-License-Identifier: Apache-2.0
"""The longest n-gram at the end of each text that occurs earlier in it, with work linear in the tokens for any text.

In NumPy, not Numba: once Numba is imported, no CPU engine of vLLM 0.32 starts in that process (its scan of all modules
calls `vars(value).get`, and one of llvmlite's values is no dict there), and each worker would compile for a second.
"""

from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 18  # tokens compared at once, which fit into the cache with their masks


def longest_matches(token_ids: np.ndarray, ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Match the last tokens of each text against all earlier places in it.

    A match may overlap the end of the text, but is not the end itself. The first of several longest matches counts, as
    in vLLM's n-gram method. Each text is compared at most `longest` times, each time one token against all places.

    Args:
        token_ids: [rows, longest text] tokens of each row.
        ends: [rows] number of tokens of each row; no match is searched below 2.
        longest: length at which a match ends, at least 1.

    Returns:
        (lengths [rows], the index of each match's last token [rows]), int64, both 0 where nothing matches.
    """
    lengths, places = np.zeros((2, len(ends)), dtype=np.int64)
    for rows in _blocks(ends):
        lengths[rows], places[rows] = _match(token_ids[rows, : ends[rows[0]]], ends[rows], longest)
    return lengths, places


def _blocks(ends: np.ndarray) -> Iterator[np.ndarray]:
    """Rows to compare together, the longest first: at most BLOCK tokens or one row, less than half of it padding."""
    order = np.argsort(-ends, kind="stable")
    order = order[ends[order] > 1]
    while len(order):
        width = int(ends[order[0]])
        rows = min(int((2 * ends[order] > width).sum()), max(BLOCK // width, 1))
        yield order[:rows]
        order = order[rows:]


def _match(texts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """longest_matches() for [rows, width] texts; the first row has no padding."""
    rows, last = np.arange(len(ends)), ends - 1
    lengths, places = np.zeros((2, len(ends)), dtype=np.int64)
    width = texts.shape[1] - 1
    # [rows, places] whether the `length` tokens up to each place equal the text's last ones
    agree = texts[:, :width] == texts[rows, last][:, None]
    padded = last.min()
    agree[:, padded:] &= np.arange(padded, width) < last[:, None]
    same = np.empty_like(agree)
    for length in range(1, longest + 1):
        first = agree.argmax(axis=1)
        matches = agree[rows, first]
        lengths[matches], places[matches] = length, first[matches]
        if length == min(longest, width) or not matches.any():
            break
        # A text too short for another token has no places left.
        wanted = texts[rows, np.maximum(last - length, 0)]
        np.equal(texts[:, : width - length], wanted[:, None], out=same[:, length:])
        agree[:, :length] = False
        agree[:, length:] &= same[:, length:]
    return lengths, places
