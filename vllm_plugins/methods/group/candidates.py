# SPDX-License-Identifier: Apache-2.0
"""Candidates of a request in the paged KV cache: each writes its last block apart, and the
right one is copied over the others (PPD, section 3).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.paged_copy import copy_blocks, copy_entries, entry_places
from vllm_ppd.vllm_plugins.methods.group.passes import NONE


def added_blocks(kv_cache_config: Any, extra: int) -> np.ndarray:
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


class KVBlocks:
    """The blocks of a runner's cache.

    Args:
        runner: vLLM's model runner V2.
        layers: selects the layers of a KV cache group whose cache is copied.
    """

    def __init__(
        self, runner: Any, layers: Callable[[Sequence[str]], list[str]]
    ) -> None:
        self.runner = runner
        self.layers = layers
        # Of each KV cache group: index of each token within a block.
        self._places: dict[int, torch.Tensor] = {}

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, in each KV cache group."""
        sizes: list[int] = self.runner.block_tables.block_sizes
        return sizes

    def holding(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The block of each request row that holds a position: [rows, groups] int32."""
        device = self.runner.device
        index = async_tensor_h2d(rows, device=device)
        columns = async_tensor_h2d(positions, device=device)
        tables = zip(
            self.runner.block_tables.block_tables, self.block_sizes, strict=True
        )
        return torch.stack(
            [table.gpu[index, columns // size] for table, size in tables], dim=1
        )

    def copy(
        self,
        origins: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> None:
        """Copy blocks of every group.

        Args:
            origins, targets: [blocks, groups] block IDs.
            positions: [blocks] the only position of each to copy; None: all. On a CPU,
                whose blocks are large, that entry alone is copied; elsewhere whole
                blocks, since a backend may keep a block's tokens in any order.
        """
        for gid, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            names = self.layers(group.layer_names)
            origin = origins[:, gid].long()
            target = targets[:, gid].long()
            entries = positions is not None and self.runner.device.type == "cpu"
            if not entries or not names:
                copy_blocks([self._blocks(name) for name in names], origin, target)
                continue
            assert positions is not None
            size = self.block_sizes[gid]
            origin = origin * size + positions % size
            target = target * size + positions % size
            places = self._entry_places(gid, names[0])
            copy_entries([self._cache(name) for name in names], origin, target, places)

    def _entry_places(self, gid: int, name: str) -> torch.Tensor:
        """The places of tokens in a block of this group, as the CPU backend writes them."""
        if gid not in self._places:
            layer = self.runner.compilation_config.static_forward_context[name]
            dtype = self.runner.model_config.dtype

            def write(cache: torch.Tensor, slot: int, numbers: torch.Tensor) -> None:
                numbers = numbers.to(dtype).view(1, 2, layer.num_kv_heads, -1)
                key, value = numbers.unbind(1)
                layer.impl.do_kv_cache_update(
                    layer, key, value, cache, torch.tensor([slot])
                )

            self._places[gid] = entry_places(write, layer.kv_cache)
        return self._places[gid]

    def _blocks(self, name: str) -> torch.Tensor:
        """A layer's cache by the scheduler's blocks, which a backend may have split."""
        return self._cache(name).unflatten(
            0, (self.runner.kv_cache_config.num_blocks, -1)
        )

    def _cache(self, name: str) -> torch.Tensor:
        layer = self.runner.compilation_config.static_forward_context[name]
        cache: torch.Tensor = layer.kv_cache
        return cache


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
