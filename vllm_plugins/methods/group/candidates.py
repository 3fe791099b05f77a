# SPDX-License-Identifier: Apache-2.0
"""The k candidates for a request's next token, side by side at one position.

They share the request's KV blocks up to that position, where they differ. So every
candidate but the first writes into a tail block of its own, which holds the same tokens
as the request's; the first writes into the request's. When the target has chosen, the
chosen token's entry is copied into the others.
"""

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.vllm_plugins.methods.group.kv_blocks import KVBlocks, added_blocks
from vllm_ppd.vllm_plugins.methods.group.passes import NONE


class Candidates:
    """Tail blocks of the candidates, and which are up to date with their request's
    block.

    Args:
        blocks: the first stage's KV cache, of the layers that candidates run through.
        count: k.
        requests: the most requests of a group at once.
    """

    def __init__(self, blocks: KVBlocks, count: int, requests: int) -> None:
        self.blocks = blocks
        self.count = count
        self.requests = requests
        # [requests, k - 1, KV cache groups] block IDs
        self.tails = np.zeros((0, 0, 0), dtype=np.int64)
        # [requests] request and table index of the block of which the tail blocks are
        # copies
        self.copied: list[tuple[int, int] | None] = [None] * requests

    def reserve(self, kv_cache_config: Any) -> None:
        """Allocate the tail blocks."""
        shape = self.requests, self.count - 1, len(kv_cache_config.kv_cache_groups)
        self.tails = added_blocks(kv_cache_config, int(np.prod(shape))).reshape(shape)

    def warm_up(self) -> None:
        """Compile the kernel of the copies by copying a tail block of every group onto itself."""
        if self.count > 1:
            tail = self._on_device(self.tails[0, :1])
            self.blocks.copy(tail, tail, None)

    def tails_of(self, rows: np.ndarray) -> np.ndarray:
        """The tail block of every candidate of batch rows; NONE for the request's own.

        Returns:
            [rows, k, KV cache groups]
        """
        none = np.full((len(rows), 1, self.tails.shape[2]), NONE, dtype=np.int64)
        return np.concatenate([none, self.tails[rows]], axis=1)

    def prepare(
        self, rows: np.ndarray, requests: np.ndarray, positions: np.ndarray
    ) -> None:
        """Copy the part of a block before a position into the tail blocks.

        Args:
            rows: [requests] batch rows.
            requests: [requests] their rows in vLLM's block tables.
            positions: [requests] where candidates are about to write.
        """
        if self.count == 1:
            return
        indices = positions // self.blocks.block_sizes[0]
        held = list(zip(requests.tolist(), indices.tolist(), strict=True))
        copied = [self.copied[row] for row in rows.tolist()]
        changed = [now != before for now, before in zip(held, copied, strict=True)]
        stale = np.array(changed, dtype=bool)
        # At the start of a block there is nothing to copy.
        partly = np.flatnonzero(stale & (positions % self.blocks.block_sizes[0] > 0))
        first = np.zeros(len(partly), dtype=np.int64)
        self._copy(rows[partly], requests[partly], positions[partly], first, whole=True)
        for row, block in zip(rows.tolist(), held, strict=True):
            self.copied[row] = block

    def choose(
        self,
        rows: np.ndarray,
        requests: np.ndarray,
        positions: np.ndarray,
        winners: np.ndarray,
    ) -> None:
        """Copy the winner's entry into the request's block and those of its other
        candidates.

        Args:
            rows: [requests] batch rows.
            requests: [requests] their rows in vLLM's block tables.
            positions: [requests] where their candidates wrote.
            winners: [requests] the right candidate; 0 also if the request's own block
                was written again.
        """
        if self.count > 1:
            self._copy(rows, requests, positions, winners, whole=False)

    def forget(self) -> None:
        """Reset after a change of the batch or of block tables."""
        self.copied = [None] * self.requests

    def _copy(
        self,
        rows: np.ndarray,
        requests: np.ndarray,
        positions: np.ndarray,
        sources: np.ndarray,
        whole: bool,
    ) -> None:
        if not len(rows):
            return
        own = self.blocks.holding(requests, positions)[:, None]
        tails = self._on_device(self.tails[rows]).to(own.dtype)
        blocks = torch.cat([own, tails], dim=1)  # [rows, k, groups]
        owners, others = np.nonzero(np.arange(self.count) != sources[:, None])
        index = self._on_device(owners)
        self.blocks.copy(
            blocks[index, self._on_device(sources[owners])],
            blocks[index, self._on_device(others)],
            None if whole else self._on_device(positions[owners]),
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(values, device=self.blocks.runner.device)
