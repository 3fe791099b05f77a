# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup, row by row: a request whose text repeats itself drafts the tokens that
followed, and others keep the method's drafts.

A match counts by its length and by whether the text continues with the method's first
draft. Each such kind has a counter of what the text's drafts gained over the method's
(kernels/lookup.py, judge), and the text's are taken while it is positive. The counters
stay on the device and follow token IDs alone, so every tensor-parallel rank has the
same.

vLLM keeps every token of every request on the device for it. Output does not depend on
the source of a draft (verification.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.lookup import Texts, judge, look_up
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import (
    Drafter,
    DraftInputs,
    Drafts,
    LookedUp,
)
from vllm_ppd.vllm_plugins.engine.staging import DeviceCounts
from vllm_ppd.vllm_plugins.engine.target import Target

LONGEST = 8  # most tokens compared, unless the shortest match is longer
WINDOW = 32768  # latest tokens of a text that are searched
# Right drafts that a kind of match is ahead at first: most are, and a rare kind should
# not be left for a single trial
START = 4
# That it may be ahead or behind, so that it follows a change
LIMIT = 64


class Lookup:
    """Looks up drafts of request rows.

    Args:
        config: our options, with lookups.
        rows: request rows.
        req_states: vLLM's RequestState.
        device: of the drafts.

    Attributes:
        shortest: tokens that must agree with an earlier place.
        alone: whether no other drafts compete.
        gains: [kinds] int32, see kernels.lookup.judge.
        vocab_size: of a multimodal target, in whose prompts the placeholders of images
            and sounds may lie outside the vocabulary; None of another target.
    """

    vocab_size: int | None = None

    def __init__(
        self,
        config: DraftingConfig,
        rows: int,
        req_states: Any,
        device: torch.device,
    ) -> None:
        assert config.prompt_lookup_min
        self.shortest = config.prompt_lookup_min
        self.longest = max(self.shortest, LONGEST)
        self.alone = config.spec.looks_up_alone
        drafts = config.num_speculative_tokens
        self.texts = Texts(req_states.all_token_ids.gpu, req_states.total_len.gpu)
        self.matched = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, drafts, dtype=torch.int64, device=device)
        # Of each request row, and one more for padding
        self._taken = DeviceCounts(rows + 1, device)
        self._began = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        # Rows of new requests of which the device does not know yet
        self._admitted: list[int] = []
        self._trials = torch.zeros(
            rows + 1, 1 + 2 * drafts, dtype=torch.int64, device=device
        )
        kinds = 2 * (1 + self.longest)
        self.gains = torch.zeros(kinds, dtype=torch.int32, device=device)
        self.forget()

    def forget(self) -> None:
        """Forget what drafts gained."""
        self.gains[:2] = 0  # no match
        self.gains[2:] = START

    def add_request(self, row: int) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self._admitted.append(row)

    def apply(self) -> None:
        """Start to count added requests anew, before a step drafts."""
        if self._admitted:
            rows = async_tensor_h2d(
                self._admitted, dtype=torch.int64, device=self._began.device
            )
            self._began.index_fill_(0, rows, 0)
            self._admitted.clear()

    def find(self, rows: Tensor) -> LookedUp:
        """Look up drafts for request rows.

        Args:
            rows: [requests] int64, -1 for padding, which has no match.
        """
        matched = self.matched[: len(rows)]
        tokens = self.tokens[: len(rows)]
        chosen(look_up, rows)(
            self.texts, rows, self.shortest, self.longest, WINDOW, matched, tokens
        )
        if self.vocab_size is not None:
            outside = (tokens >= self.vocab_size).any(dim=1)
            matched.masked_fill_(outside, 0)
            tokens.clamp_(max=self.vocab_size - 1)
        return LookedUp(matched, tokens, self.gains)

    def choose(
        self, rows: Tensor, looked_up: LookedUp, first: Tensor, drafts: Tensor
    ) -> None:
        """Write looked-up drafts over those of the method where they are taken, and
        count what came of earlier ones.

        Args:
            rows: as given to find.
            looked_up: what it returned.
            first: the method's first drafts as proposed [requests].
            drafts: the method's [requests, K], written.
        """
        taken = looked_up.taken(first)
        if not self.alone:
            kinds = looked_up.kinds(first)[:, None]
            chosen(judge, rows)(
                self.texts,
                rows,
                torch.cat([kinds, looked_up.token_ids, drafts], dim=1),
                self._began,
                self._trials,
                self.gains,
            )
            self.gains.clamp_(-LIMIT, LIMIT)
        torch.where(taken[:, None], looked_up.token_ids, drafts, out=drafts)
        self._taken.value[rows] = taken.long()

    def taken(self, rows: np.ndarray) -> list[int]:
        """Whether request rows took looked-up drafts in the latest step that the device
        has ended: [rows], 0 or 1.
        """
        return self._taken.seen[rows].tolist()


class LookupDrafter(Drafter):
    """Placeholder drafts for requests without a match, as vLLM expects K drafts of every
    request: the newest token again, which costs nothing.
    """

    def load(self, config: DraftingConfig, target: Target) -> None:
        """Nothing to load."""

    def propose(self, step: DraftInputs) -> Drafts:
        return Drafts(step.newest_ids[:, None].repeat(1, step.num_drafts))
