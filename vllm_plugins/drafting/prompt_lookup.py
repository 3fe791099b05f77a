# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup before the method: where a request's text repeats itself, what followed there is the draft.

Such a draft costs next to nothing to make, so a step after which its expected speed-up exceeds that of the method's own
drafts is left to it; every other step is the method's. In one step all drafts are of one source: the lookup's have no
q(x).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.vllm_plugins.config.options import LONGEST_LOOKUP
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.drafting.ngram_match import longest_matches

LENGTHS = np.array([3, 4, 6, 10, 18])  # of agreement from which on drafts are of another kind
KINDS = 2 * (len(LENGTHS) + 1)  # greedy and sampling requests' drafts by length
PRIOR_WEIGHT = 256.0  # the length of the agreement says more of a draft than the request does


class Lookup(NamedTuple):
    """What the lookup has for each row of a batch."""

    tokens: np.ndarray  # [rows, N] drafts, 0 where there are none
    counts: np.ndarray  # [rows] how many they are
    lengths: np.ndarray  # [rows] tokens that agree


def find(
    token_ids: np.ndarray,  # [rows, longest text] tokens of each row
    ends: np.ndarray,  # [rows] tokens that each has; 0 to look up none
    shortest: int,  # tokens that must agree
    most: int,  # drafts, N
) -> Lookup:
    """Draft what followed the earlier place that agrees with the text's last tokens longest, of several the first.

    It is the draft of vLLM's own n-gram method.
    """
    lengths, places = longest_matches(token_ids, ends, LONGEST_LOOKUP)
    counts = np.where(lengths >= shortest, np.minimum(most, ends - 1 - places), 0)
    offsets = np.arange(most)
    index = np.minimum(places[:, None] + 1 + offsets, token_ids.shape[1] - 1)
    tokens = np.where(offsets < counts[:, None], np.take_along_axis(token_ids, index, axis=1), 0)
    return Lookup(tokens.astype(np.int64), counts, lengths)


class DraftSources:
    """Chooses between the lookup's drafts and the method's, step by step.

    Args:
        shortest: tokens that must agree with an earlier place.
        most: looked-up drafts of a request, N; the method's may be more or fewer.
        method: chooses the method's drafts (None: lookups are taken wherever every request that drafts has one).
        lookup: chooses the lookup's drafts, of KINDS kinds.
    """

    def __init__(
        self,
        shortest: int,
        most: int,
        method: DraftLengthController | None = None,
        lookup: DraftLengthController | None = None,
    ) -> None:
        self.shortest, self.most, self.method, self.lookup = shortest, most, method, lookup

    def observe(self, req_ids: list[str], emitted: np.ndarray) -> None:
        """As DraftLengthController.observe."""
        for controller in (self.method, self.lookup):
            if controller is not None:
                controller.observe(req_ids, emitted)

    def find(self, batch: Any, allowed: np.ndarray) -> Lookup:
        """In the prompt and the output of each request of vLLM's batch that may be given drafts."""
        ends = np.where(allowed > 0, batch.lengths, 0).astype(np.int64)
        return find(batch.token_ids, ends, self.shortest, self.most)

    def choose(
        self,
        batch: Any,
        allowed: np.ndarray,
        able: np.ndarray,
        emitting: int,
        greedy: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Drafts of each row for the next step.

        Args:
            batch: vLLM's.
            allowed: [rows] drafts that each may be given from its text.
            able: [rows] drafts that the method can make.
            emitting: rows that go on decoding.
            greedy: [rows] bool, whether the request decodes greedily.

        Returns:
            (drafts [rows], their tokens [rows, N] where they were looked up).
        """
        looked_up = self.find(batch, allowed)
        drafts = np.minimum(looked_up.counts, allowed)
        if self.lookup is None or self.method is None:
            everyone = drafts.any() and drafts[able > 0].all()
            return (drafts, looked_up.tokens) if everyone else (able, None)
        kinds = greedy + 2 * np.searchsorted(LENGTHS, looked_up.lengths, side="right")
        drafts = self.lookup.choose(drafts, emitting, kinds)
        if drafts.any() and self.lookup.gain >= self.method.expected(able, emitting, greedy):
            self.method.retract()
            return drafts, looked_up.tokens
        self.lookup.retract()
        return self.method.choose(able, emitting, greedy), None
