# SPDX-License-Identifier: Apache-2.0
"""The k candidates for a request's next token, side by side at one position.

They share the request's KV blocks up to that position, where they differ. So every candidate but the first writes into
a tail block of its own, which holds the same tokens as the request's; the first writes into the request's. When the
target has chosen, the chosen token's entry is copied into the others.
"""

from typing import Any

import numpy as np

from vllm_ppd.vllm_plugins.engine.v1.batch import Batch
from vllm_ppd.vllm_plugins.methods.group.kv_blocks import KVBlocks, added_blocks

NONE = -1


class Candidates:
    """Tail blocks of the candidates, and which of them are up to date with their request's block.

    Args:
        batch: the first stage's batch.
        blocks: its KV cache, of the layers that candidates run through.
        count: k.
        requests: the most requests of a group at once.
    """

    def __init__(self, batch: Batch, blocks: KVBlocks, count: int, requests: int) -> None:
        self.batch, self.blocks = batch, blocks
        self.count = count
        self.requests = requests
        self.tails = np.zeros((0, 0, 0), dtype=np.int64)  # [requests, k - 1, KV cache groups] block ids
        # [requests] request name and table index of the block of which the tail blocks are copies
        self.copied: list[tuple[str, int] | None] = [None] * requests

    def reserve(self, kv_cache_config: Any) -> None:
        """Allocate the tail blocks."""
        shape = self.requests, self.count - 1, len(kv_cache_config.kv_cache_groups)
        self.tails = added_blocks(kv_cache_config, int(np.prod(shape))).reshape(shape)

    def warm_up(self) -> None:
        """Compile the kernel of the copies by copying a tail block of every group onto itself, before use."""
        if self.count > 1:
            tail = self.tails[0, :1]
            self.blocks.copy(tail, tail, None)

    def tails_of(self, rows: np.ndarray) -> np.ndarray:
        """The tail block of every candidate of batch rows: [rows, k, groups]; NONE for the request's own."""
        none = np.full((len(rows), 1, self.tails.shape[2]), NONE, dtype=np.int64)
        return np.concatenate([none, self.tails[rows]], axis=1)

    def prepare(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Copy the part of a block before a position into the tail blocks, before candidates run at that position.

        Args:
            rows: [requests] batch rows.
            positions: [requests] where the candidates will write.
        """
        if self.count == 1:
            return
        names, size = self.batch.req_ids, self.blocks.block_size
        stale = [
            place
            for place, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
            if self.copied[row] != (names[row], position // size)
        ]
        if stale:
            # At the start of a block there is nothing to copy.
            partly = [place for place in stale if positions[place] % size]
            first = np.zeros(len(partly), dtype=np.int64)
            self._copy(rows[partly], positions[partly], first, whole=True)
            for place in stale:
                self.copied[rows[place]] = (names[rows[place]], int(positions[place]) // size)

    def choose(self, rows: np.ndarray, positions: np.ndarray, winners: np.ndarray) -> None:
        """Copy the winner's entry into the request's block and those of its other candidates.

        Args:
            rows: [requests] batch rows.
            positions: [requests] where their candidates wrote.
            winners: [requests] the right candidate; 0 also if the request's own block was written again.
        """
        if self.count > 1:
            self._copy(rows, positions, winners, whole=False)

    def forget(self) -> None:
        """Reset after a change of rows, names or block tables."""
        self.copied = [None] * self.requests

    def _copy(self, rows: np.ndarray, positions: np.ndarray, sources: np.ndarray, whole: bool) -> None:
        if not len(rows):
            return
        blocks = self.tails_of(rows)  # [rows, k, groups]
        blocks[:, 0] = self.blocks.holding(rows, positions)
        source = np.take_along_axis(blocks, sources[:, None, None], axis=1)
        others = np.arange(self.count) != sources[:, None]
        origins = np.broadcast_to(source, blocks.shape)[others]  # [rows * (k - 1), groups]
        self.blocks.copy(origins, blocks[others], None if whole else np.repeat(positions, self.count - 1))
