# SPDX-License-Identifier: Apache-2.0
"""What each request has emitted in a group step, as the first stage knows it, and its
candidates in the paged KV cache: each writes its last block apart, and the right one is
copied over the others (PPD, section 3).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from vllm_ppd.kernels.paged_copy import copy_blocks, copy_entries, entry_places
from vllm_ppd.vllm_plugins.methods.group.stage import GroupStep, Stage

NONE = -1  # no request row, no block


def added_blocks(kv_cache_config: Any, extra: int) -> ndarray:
    """Add blocks to every KV cache group, after those of vLLM's scheduler.

    Args:
        kv_cache_config: vLLM's, which is changed.
        extra: blocks.

    Returns:
        [extra] their IDs.
    """
    before = kv_cache_config.num_blocks
    for tensor in kv_cache_config.kv_cache_tensors:
        tensor.size += tensor.size // before * extra
        if (
            tensor.layer_stride == tensor.block_stride * before
        ):  # a layer's blocks lie together
            tensor.layer_stride += tensor.block_stride * extra
            tensor.offset += tensor.offset // before * extra
    kv_cache_config.num_blocks += extra
    return np.arange(before, before + extra)


class Candidates:
    """Tail blocks of the candidates, and which are up to date with their request's
    block.

    Args:
        stage: the group's first; candidates run through the first stack of its cut.
        count: k.
        requests: the most requests of a group at once.
    """

    def __init__(self, stage: Stage, count: int, requests: int) -> None:
        self.runner = stage.runner
        self.cut = stage.cut
        self._on_device = stage.index
        self.count = count
        self.requests = requests
        # [requests, k - 1, KV cache groups] block IDs
        self.tails = np.zeros((0, 0, 0), dtype=np.int32)
        # [requests, 2] request row and table index of the block of which the tail
        # blocks are copies
        self.copied = np.full((requests, 2), NONE)
        # Of each KV cache group: index of each token within a block
        self._entry_places: dict[int, Tensor] = {}

    def reserve(self, kv_cache_config: Any) -> None:
        """Allocate the tail blocks."""
        shape = (
            self.requests,
            self.count - 1,
            len(kv_cache_config.kv_cache_groups),
        )
        added = added_blocks(kv_cache_config, int(np.prod(shape)))
        self.tails = added.astype(np.int32).reshape(shape)

    def own(self, requests: ndarray, positions: ndarray) -> Tensor:
        """The request's block that holds a position: [rows, KV cache groups] int32.

        Args:
            requests: [rows] rows of vLLM's block tables.
            positions: [rows] int64.
        """
        tables = self.runner.block_tables
        index = self._on_device(requests)
        columns = self._on_device(positions)
        groups = zip(tables.block_tables, tables.block_sizes, strict=True)
        held = [table.gpu[index, columns // size] for table, size in groups]
        return torch.stack(held, dim=1)

    def blocks(
        self, rows: ndarray, requests: ndarray, positions: ndarray
    ) -> Tensor:
        """The block that each candidate writes: [rows, k, KV cache groups] int32.

        The first candidate writes the request's own block.

        Args:
            rows: [rows] batch rows.
            requests, positions: as in own.
        """
        own = self.own(requests, positions)
        tails = self._on_device(self.tails[rows])
        return torch.cat([own[:, None], tails], dim=1)

    def prepare(
        self, rows: ndarray, requests: ndarray, positions: ndarray
    ) -> None:
        """Copy the part of a block before a position into the tail blocks.

        Args:
            rows, requests, positions: as in blocks.
        """
        block_size = self.runner.block_tables.block_sizes[0]
        indices, offsets = np.divmod(positions, block_size)
        held = np.stack([requests, indices], axis=1)
        # At the start of a block there is nothing to copy.
        changed = (self.copied[rows] != held).any(axis=1)
        stale = changed & (offsets > 0)
        self.copied[rows] = held
        first = np.zeros(stale.sum(), dtype=np.int64)
        self.copy(
            rows[stale], requests[stale], positions[stale], first, whole=True
        )

    def forget(self) -> None:
        """Reset after a change of the batch or of block tables."""
        self.copied.fill(NONE)

    def copy(
        self,
        rows: ndarray,
        requests: ndarray,
        positions: ndarray,
        sources: ndarray,
        *,
        whole: bool = False,
    ) -> None:
        """Copy the source candidate's blocks of every group over the request's block and
        those of its other candidates.

        Args:
            rows, requests, positions: as in blocks.
            sources: [rows] the right candidate; 0 also if the request's own block was
                written again.
            whole: whether more than the entry at the position has changed.

        On a CPU, whose blocks are large, only the entry at the position is copied
        unless the whole block is asked for. Elsewhere whole blocks are, since a backend
        may keep a block's tokens in any order.
        """
        is_target = np.arange(self.count) != sources[:, None]
        owners, others = np.nonzero(is_target)
        if not len(owners):
            return
        blocks = self.blocks(rows, requests, positions).long()
        index = self._on_device(owners)
        origins = blocks[index, self._on_device(sources[owners])]
        targets = blocks[index, self._on_device(others)]
        entries = not whole and self.runner.device.type == "cpu"
        slots = self._on_device(positions[owners])
        for gid, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            names = self.cut.attention_layers(0, group.layer_names)
            caches = [self._layer(name).kv_cache for name in names]
            origin = origins[:, gid]
            target = targets[:, gid]
            if entries and names:
                places = self._places_of_entries(gid, names[0])
                size = len(places)
                offset = slots % size
                copy_entries(
                    caches, origin * size + offset, target * size + offset, places
                )
            else:
                # A backend may have split the scheduler's blocks
                split = self.runner.kv_cache_config.num_blocks, -1
                whole_blocks = [cache.unflatten(0, split) for cache in caches]
                copy_blocks(whole_blocks, origin, target)

    def _places_of_entries(self, gid: int, name: str) -> Tensor:
        """The places of tokens in a block of this group, as the CPU backend writes them."""
        if gid not in self._entry_places:
            layer = self._layer(name)
            dtype = self.runner.model_config.dtype

            def write(cache: Tensor, slot: int, numbers: Tensor) -> None:
                numbers = numbers.to(dtype).view(1, 2, layer.num_kv_heads, -1)
                key, value = numbers.unbind(1)
                layer.impl.do_kv_cache_update(
                    layer, key, value, cache, torch.tensor([slot])
                )

            self._entry_places[gid] = entry_places(write, layer.kv_cache)
        return self._entry_places[gid]

    def _layer(self, name: str) -> Any:
        """vLLM's attention layer of this name."""
        return self.runner.compilation_config.static_forward_context[name]


class Progress:
    """A group step for the first stage; every array has an entry per batch row.

    A request's token at hand is ready (its state after d_bar exists), missed (it must
    still run through the first stage), or out (the request ended).

    Args:
        step: of which this is the progress.
        lengths: the most tokens of each request, prompt included.
        stops: tokens that end each request.
    """

    def __init__(
        self, step: GroupStep, lengths: ndarray, stops: Sequence[set[int]]
    ) -> None:
        count = step.size
        self.request_rows = step.request_rows
        self.lengths = lengths
        self.stops = stops
        self.position = step.positions.copy()  # of the token at hand
        # The token at hand, once one was emitted
        self.token = np.zeros(count, dtype=np.int64)
        self.allowance = step.allowance
        self.emitted = np.zeros(count, dtype=np.int64)
        self.ready = np.ones(count, dtype=bool)
        self.missed = np.zeros(count, dtype=bool)

    def allowed(self, rows: ndarray) -> ndarray:
        """Which of some rows [batch rows] bool may emit another token."""
        return np.flatnonzero(rows & (self.emitted < self.allowance))

    def emit(self, rows: ndarray, tokens: ndarray) -> ndarray:
        """Record the target's next token of some rows: which of them continue [rows] bool."""
        self.emitted[rows] += 1
        self.token[rows] = tokens
        self.position[rows] += 1
        self.ready[rows] = False
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        stopped = [token in self.stops[row] for row, token in pairs]
        continues: ndarray = self.position[rows] + 1 < self.lengths[rows]
        return continues & ~np.array(stopped, dtype=bool)
