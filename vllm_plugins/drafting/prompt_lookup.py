# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup beside the method: if a request's text repeats itself, the tokens that followed are the drafts.

Each request takes the drafts of which more are expected to be accepted: by the acceptance that was counted for matches
of this length, and for the method's drafts of this request.
"""

from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.vllm_plugins.config.options import LONGEST_LOOKUP
from vllm_ppd.vllm_plugins.draft_length.controller import KINDS, Acceptance
from vllm_ppd.vllm_plugins.drafting.ngram_match import longest_matches

LENGTHS = np.array([3, 4, 6, 10, 18])  # match lengths at which the drafts' kind changes
ALL_KINDS = KINDS + 2 * (len(LENGTHS) + 1)  # kinds of the method's drafts, and of looked-up drafts by match length
TRY_AGAIN = 128  # steps after which a lookup that seemed worse than the method's drafts is tried again


class Lookup(NamedTuple):
    """Looked-up drafts for each row of a batch."""

    tokens: np.ndarray  # [rows, N] drafts, 0 where there are none
    counts: np.ndarray  # [rows] number of drafts
    lengths: np.ndarray  # [rows] matching tokens


def find(
    token_ids: np.ndarray,  # [rows, longest text] tokens of each row
    ends: np.ndarray,  # [rows] tokens of each row; 0: no lookup
    shortest: int,  # tokens that must agree
    most: int,  # drafts, N
) -> Lookup:
    """Draft the tokens after the longest (of several, the first) earlier match of the text's last tokens.

    vLLM's own n-gram method makes the same draft.
    """
    lengths, places = longest_matches(token_ids, ends, LONGEST_LOOKUP)
    counts = np.where(lengths >= shortest, np.minimum(most, ends - 1 - places), 0)
    offsets = np.arange(most)
    index = np.minimum(places[:, None] + 1 + offsets, token_ids.shape[1] - 1)
    tokens = np.where(offsets < counts[:, None], np.take_along_axis(token_ids, index, axis=1), 0)
    return Lookup(tokens.astype(np.int64), counts, lengths)


class DraftSources:
    """The choice between looked-up drafts and the method's, request by request.

    Args:
        shortest: tokens that must agree with an earlier place.
        most: drafts of a request, N.
    """

    def __init__(self, shortest: int, most: int) -> None:
        self.shortest, self.most = shortest, most
        self._steps = 0

    def choose(
        self, batch: Any, allowed: np.ndarray, by_method: np.ndarray, greedy: np.ndarray, acceptance: Acceptance | None
    ) -> tuple[Lookup, np.ndarray, np.ndarray]:
        """Take the drafts of which more are expected to be accepted.

        Args:
            batch: vLLM's.
            allowed: [rows] drafts that each may be given from its text.
            by_method: [rows] drafts that the method can make.
            greedy: [rows] bool, whether the request decodes greedily.
            acceptance: counts of drafts (None: every draft that can be looked up is taken).

        Returns:
            (lookup, with no drafts where the method's are taken; drafts [rows] of either; their kinds [rows]).
        """
        found = find(batch.token_ids, np.where(allowed > 0, batch.lengths, 0), self.shortest, self.most)
        counts, kinds = np.minimum(found.counts, allowed), greedy.astype(np.int64)
        of_lookup = KINDS + kinds + 2 * np.searchsorted(LENGTHS, found.lengths, side="right")
        self._steps += 1
        if acceptance is not None and self._steps % TRY_AGAIN and counts.any() and by_method.any():
            worse = acceptance.expected(of_lookup, counts) < acceptance.expected(kinds, by_method)
            counts = np.where(worse, 0, counts)
        taken = counts > 0
        drafts, kinds = np.where(taken, counts, by_method), np.where(taken, of_lookup, kinds)
        return found._replace(counts=counts), drafts, kinds
