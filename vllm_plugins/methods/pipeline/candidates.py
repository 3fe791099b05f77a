# SPDX-License-Identifier: Apache-2.0
"""k candidates for a request's next token, side by side at one position.

They share the request's KV blocks up to that position. At it they differ, so every candidate but the first writes into
a tail block of its own, which holds the same tokens as the request's; the first writes into the request's. When the
target has chosen, the chosen token's entry is copied into the others: on a CPU, whose blocks are large, that entry
alone; elsewhere whole blocks, since a backend may keep the tokens of a block in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.paged_copy import copy_blocks
from vllm_ppd.kernels.paged_entries import copy_entries, entry_places
from vllm_ppd.model_patches.base import ModelCut

NONE = -1


class Candidates:
    """Tail blocks of the candidates, and which of them hold what their request's block holds.

    Args:
        runner: the first stage's model runner.
        cut: the first stage; candidates run through its first stack.
        candidates: k.
        requests: most requests that a group serves at once.
    """

    def __init__(self, runner: Any, cut: ModelCut, candidates: int, requests: int) -> None:
        self.runner, self.cut = runner, cut
        self.count = candidates
        self.requests = requests
        self.tails = np.zeros((0, 0, 0), dtype=np.int64)  # [requests, k - 1, KV cache groups] block ids
        # [requests] the block of the request that its tail blocks are copies of, by name and place in the table
        self.copied: list[tuple[str, int] | None] = [None] * requests
        self.places: dict[int, torch.Tensor] = {}  # of each KV cache group: where a block keeps which token

    def reserve(self, kv_cache_config: Any) -> None:
        """Make room for the tail blocks behind the blocks that vLLM's scheduler knows of."""
        groups = len(kv_cache_config.kv_cache_groups)
        before, extra = kv_cache_config.num_blocks, self.requests * (self.count - 1) * groups
        self.tails = np.arange(before, before + extra).reshape(self.requests, self.count - 1, groups)
        for tensor in kv_cache_config.kv_cache_tensors:
            tensor.size += tensor.size // before * extra
            if tensor.layer_stride == tensor.block_stride * before:  # a layer's blocks lie together
                tensor.layer_stride += tensor.block_stride * extra
                tensor.offset += tensor.offset // before * extra
        kv_cache_config.num_blocks += extra

    def tails_of(self, rows: np.ndarray) -> np.ndarray:
        """The tail block of every candidate of batch rows: [rows, k, groups]; NONE for the request's own."""
        own = np.full((len(rows), 1, self.tails.shape[2]), NONE, dtype=np.int64)
        return np.concatenate([own, self.tails[rows]], axis=1)

    def prepare(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Have the tail blocks hold what stands before a position in its block: called before candidates run there.

        Args:
            rows: [requests] batch rows.
            positions: [requests] where the candidates will write.
        """
        if self.count == 1:
            return
        names = self.runner.input_batch.req_ids
        size = self._block_size()
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
        """Copy what the winner wrote into the request's block and into those of its other candidates.

        Args:
            rows: [requests] batch rows.
            positions: [requests] where their candidates wrote.
            winners: [requests] the candidate that was right; 0 also where the request's own block was written anew.
        """
        if self.count > 1:
            self._copy(rows, positions, winners, whole=False)

    def forget(self) -> None:
        """Rows, names or block tables have changed."""
        self.copied = [None] * self.requests

    def _copy(self, rows: np.ndarray, positions: np.ndarray, sources: np.ndarray, whole: bool) -> None:
        if not len(rows):
            return
        blocks = self.tails_of(rows)  # [rows, k, groups]
        tables = self.runner.input_batch.block_table.block_tables
        for gid, table in enumerate(tables):
            blocks[:, 0, gid] = table.block_table.np[rows, positions // table.block_size]
        source = np.take_along_axis(blocks, sources[:, None, None], axis=1)
        others = np.arange(self.count) != sources[:, None]
        targets = blocks[others]  # [rows * (k - 1), groups]
        origins = np.broadcast_to(source, blocks.shape)[others]
        where = np.repeat(positions, self.count - 1)
        for gid, names in enumerate(self._names()):
            places = None if whole or not names else self._entry_places(gid, names[0])
            if places is None:
                origin, target = self._index(origins[:, gid]), self._index(targets[:, gid])
                chosen(copy_blocks, target)([self._blocks(name) for name in names], origin, target)
            else:
                size = tables[gid].block_size
                origin, target = (self._index(part[:, gid] * size + where % size) for part in (origins, targets))
                copy_entries([self._cache(name) for name in names], origin, target, places)

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.runner.device)

    def _entry_places(self, gid: int, name: str) -> torch.Tensor | None:
        """Where a block of this group keeps which token, as the CPU backend itself writes it; None elsewhere."""
        if self.runner.device.type != "cpu":
            return None
        if gid not in self.places:
            layer = self.runner.compilation_config.static_forward_context[name]

            def write(cache: torch.Tensor, slot: int, numbers: torch.Tensor) -> None:
                key, value = numbers.to(self.runner.model_config.dtype).view(1, 2, layer.num_kv_heads, -1).unbind(1)
                layer.impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([slot]))

            self.places[gid] = entry_places(write, layer.kv_cache)
        return self.places[gid]

    def _names(self) -> list[list[str]]:
        """The layers that candidates run through, by KV cache group."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        return [self.cut.attention_layers(0, group.layer_names) for group in groups]

    def _blocks(self, name: str) -> torch.Tensor:
        """A layer's cache, the first dimension counting the scheduler's blocks, which a backend may have divided."""
        return self._cache(name).unflatten(0, (self.runner.kv_cache_config.num_blocks, -1))

    def _cache(self, name: str) -> torch.Tensor:
        cache: torch.Tensor = self.runner.compilation_config.static_forward_context[name].kv_cache
        return cache

    def _block_size(self) -> int:
        return int(self.runner.input_batch.block_table.block_tables[0].block_size)
