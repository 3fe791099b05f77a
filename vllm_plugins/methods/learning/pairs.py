# SPDX-License-Identifier: Apache-2.0
"""The answers' positions, each with its state and the tokens after it, on the device.

A position t of an answer is one whose state gave a token of it. It is complete when
K + 1 tokens after it are known. Each request row keeps its latest states, by position,
until then. Complete positions go to a ring. Those of every second request are held out
until there are enough, since the positions of one answer tell of each other.

States of rejected drafts and of prompts are not kept. A request that is new, or resumed
after preemption, begins with its first state in the engine.
"""

from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from vllm_ppd.vllm_plugins.draft_length.learning import BLOCK, HELD
from vllm_ppd.vllm_plugins.engine.staging import DeviceCounts
from vllm_ppd.vllm_plugins.engine.target import Target

NEVER = 1 << 40  # a position that no text has


class Positions(NamedTuple):
    """Positions t of answers."""

    states: Tensor  # [positions, 2, hidden], normed, of t and t + 1
    tokens: Tensor  # [positions, K + 1] int64, the tokens after t


class Pairs:
    """Collects positions.

    Args:
        rows: request rows.
        drafts: K.
        req_states: vLLM's RequestState, with all tokens on the device.
        target: loaded.

    Attributes:
        complete: the ring's `size` positions, then HELD that are held out.
        counts: positions that went to the ring, and that are held out, so far.
    """

    def __init__(
        self, rows: int, drafts: int, req_states: Any, target: Target
    ) -> None:
        device = target.device
        self.drafts = drafts
        self.req_states = req_states
        # A step adds K + 1 positions to K + 1 that are not complete
        self.window = 2 * (drafts + 1)
        # The last one takes what is not kept, here and among the complete ones
        states = partial(torch.zeros, dtype=target.dtype, device=device)
        self.states = states(rows * self.window + 1, target.hidden_size)
        # [rows], the first position that is not complete
        self.first = torch.full((rows,), NEVER, device=device)
        # The device may be two steps ahead of the block that the host names
        blocks = 2 + -(-rows * (drafts + 1) // BLOCK)
        self.size = blocks * BLOCK
        # The ring, what is held out, and one
        slots = self.size + HELD + 1
        self.complete = Positions(
            states(slots, 2, target.hidden_size),
            torch.zeros(slots, drafts + 1, dtype=torch.int64, device=device),
        )
        self.counts = DeviceCounts(2, device)
        self.holds_out = torch.zeros(rows, dtype=torch.bool, device=device)
        self._ahead = torch.arange(drafts + 1, device=device)

    def add_request(self, row: int, req_id: str, known: int | None) -> None:
        """A request was given a row.

        Args:
            row: of the request.
            req_id: its name.
            known: its tokens so far; None: it is not learned from.
        """
        self.first[row] = NEVER if known is None else known - 1
        self.holds_out[row] = bool(crc32(req_id.encode()) % 2)

    def record(
        self,
        batch: Any,
        hidden: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
    ) -> None:
        """Add a verified step, before its tokens are added to the texts.

        Args:
            batch: vLLM's InputBatch.
            hidden: states of its tokens [tokens, hidden].
            num_sampled: tokens that each request emitted [requests].
            num_rejected: tokens after the last accepted one [requests].
        """
        rows = batch.idx_mapping.long()[:, None]
        self._complete(rows)
        ends = batch.query_start_loc[1 : len(rows) + 1, None].long()
        last = ends - 1 - num_rejected[:, None]
        places = (last - self._ahead).clamp(min=0)
        kept = self._ahead < num_sampled[:, None]
        slots = self._slots(rows, batch.positions[places], kept)
        self.states.index_copy_(0, slots.flatten(), hidden[places.flatten()])

    def _slots(self, rows: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
        """Where states of positions [requests, K + 1] are kept."""
        slots = rows * self.window + positions % self.window
        return torch.where(kept, slots, len(self.states) - 1)

    def _complete(self, rows: Tensor) -> None:
        """Move complete positions of request rows [requests, 1]."""
        texts = self.req_states
        positions = self.first[rows] + self._ahead
        complete = positions + self.drafts + 1 < texts.total_len.gpu[rows]
        positions = torch.where(complete, positions, 0)
        ahead = positions[:, :, None] + 1 + self._ahead
        tokens = texts.all_token_ids.gpu[rows[:, :, None], ahead]
        pairs = [self._slots(rows, positions + i, complete) for i in (0, 1)]
        states = self.states[torch.stack(pairs, dim=2).flatten(0, 1)]
        slots = self._free_slots(complete, self.holds_out[rows])
        self.complete.states.index_copy_(0, slots, states)
        self.complete.tokens.index_copy_(0, slots, tokens.flatten(0, 1).long())
        self.first[rows[:, 0]] += complete.sum(1)

    def _free_slots(self, complete: Tensor, held: Tensor) -> Tensor:
        """Where complete positions [requests, K + 1] go: [requests * (K + 1)].

        Args:
            complete: which of them are.
            held: whether a request's may be held out [requests, 1].
        """
        seen, held_before = self.counts.value.unbind()
        asked = (complete & held).flatten()
        place = held_before + asked.cumsum(0) - 1
        held_out = asked & (place < HELD)
        learned = complete.flatten() & ~held_out
        in_ring = (seen + learned.cumsum(0) - 1) % self.size
        slots = torch.where(learned, in_ring, self.size + HELD)
        slots = torch.where(held_out, self.size + place, slots)
        self.counts.value += torch.stack([learned.sum(), held_out.sum()])
        return slots

    def part(self, start: int, length: int) -> Positions:
        """Some complete positions: views."""
        parts = [part[start : start + length] for part in self.complete]
        return Positions(*parts)
