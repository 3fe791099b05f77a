# SPDX-License-Identifier: Apache-2.0
"""The answers' positions, on the device (kernels/answers.py).

Each request row keeps its latest states until their positions are complete. Complete
positions go to a ring. Those of every second request are held out until there are
enough, since the positions of one answer tell of each other.

States of rejected drafts and of prompts are not kept. A request that is new, or resumed
after preemption, begins with its first state in the engine.
"""

from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from vllm_ppd.kernels.answers import WINDOWS, Kept, Verified, collect
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.lookup import Texts
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
        size: of the ring.
        kept: states and positions; after the ring's, HELD that are held out.
        counts: positions that went to the ring, and that are held out, so far.
    """

    def __init__(
        self, rows: int, drafts: int, req_states: Any, target: Target
    ) -> None:
        device = target.device
        self.texts = Texts(req_states.all_token_ids.gpu, req_states.total_len.gpu)
        self.counts = DeviceCounts(2, device)
        following = drafts + 1
        # The device may be two steps ahead of the block that the host names
        blocks = 2 + -(-rows * following // BLOCK)
        self.size = blocks * BLOCK
        slots = self.size + HELD
        hidden = target.hidden_size
        states = partial(torch.zeros, dtype=target.dtype, device=device)
        numbers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.kept = Kept(
            recent=states(rows, WINDOWS * following, hidden),
            first=numbers(rows).fill_(NEVER),
            holds_out=numbers(rows),
            counts=self.counts.value,
            states=states(slots, 2, hidden),
            tokens=numbers(slots, following),
        )

    def add_request(self, row: int, req_id: str, known: int | None) -> None:
        """A request was given a row.

        Args:
            row: of the request.
            req_id: its name.
            known: its tokens so far; None: it is not learned from.
        """
        self.kept.first[row] = NEVER if known is None else known - 1
        self.kept.holds_out[row] = crc32(req_id.encode()) % 2

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
        step = Verified(
            batch.idx_mapping,
            batch.query_start_loc,
            num_sampled,
            num_rejected,
            batch.positions,
            hidden,
        )
        chosen(collect, hidden)(step, self.texts, self.kept, HELD)

    def part(self, start: int, length: int) -> Positions:
        """Some complete positions: views."""
        places = slice(start, start + length)
        return Positions(self.kept.states[places], self.kept.tokens[places])
