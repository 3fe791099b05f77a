# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of vLLM's V1 runner: the blocks of each request, room for more, and copies between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.paged_copy import copy_blocks
from vllm_ppd.kernels.paged_entries import copy_entries, entry_places


def added_blocks(kv_cache_config: Any, extra: int) -> np.ndarray:
    """Add blocks to every KV cache group, after those of vLLM's scheduler.

    Args:
        kv_cache_config: vLLM's, which is changed.
        extra: blocks.

    Returns:
        [extra] their ids.
    """
    before = kv_cache_config.num_blocks
    for tensor in kv_cache_config.kv_cache_tensors:
        tensor.size += tensor.size // before * extra
        if tensor.layer_stride == tensor.block_stride * before:  # a layer's blocks lie together
            tensor.layer_stride += tensor.block_stride * extra
            tensor.offset += tensor.offset // before * extra
    kv_cache_config.num_blocks += extra
    return np.arange(before, before + extra)


class KVBlocks:
    """The blocks of a runner's cache.

    Args:
        runner: vLLM's V1 model runner.
        layers: selects the layers of a KV cache group whose cache is copied.
    """

    def __init__(self, runner: Any, layers: Callable[[Sequence[str]], list[str]]) -> None:
        self.runner, self.layers = runner, layers
        self._index = partial(async_tensor_h2d, device=runner.device)
        self._places: dict[int, torch.Tensor] = {}  # of each KV cache group: index of each token within a block

    @property
    def block_size(self) -> int:
        """Tokens per block, in the first group."""
        return int(self._tables[0].block_size)

    def holding(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The block of each batch row that holds a position: [rows, groups]."""
        return np.stack([table.block_table.np[rows, positions // table.block_size] for table in self._tables], axis=1)

    def copy(self, origins: np.ndarray, targets: np.ndarray, positions: np.ndarray | None) -> None:
        """Copy blocks of every group.

        Args:
            origins, targets: [blocks, groups] block ids.
            positions: [blocks] the only position of each to copy: on a CPU, whose blocks are large, that
                entry alone; elsewhere whole blocks, since a backend may keep a block's tokens in any order. None: all.
        """
        for gid, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            names, size = self.layers(group.layer_names), self._tables[gid].block_size
            places = None if positions is None or not names else self._entry_places(gid, names[0])
            if places is None:
                origin, target = self._index(origins[:, gid]), self._index(targets[:, gid])
                chosen(copy_blocks, target)([self._blocks(name) for name in names], origin, target)
            else:
                origin, target = (self._index(part[:, gid] * size + positions % size) for part in (origins, targets))
                copy_entries([self._cache(name) for name in names], origin, target, places)

    @property
    def _tables(self) -> list[Any]:
        tables: list[Any] = self.runner.input_batch.block_table.block_tables
        return tables

    def _entry_places(self, gid: int, name: str) -> torch.Tensor | None:
        """The places of tokens in a block of this group, as the CPU backend writes them; None elsewhere."""
        if self.runner.device.type != "cpu":
            return None
        if gid not in self._places:
            layer = self.runner.compilation_config.static_forward_context[name]

            def write(cache: torch.Tensor, slot: int, numbers: torch.Tensor) -> None:
                key, value = numbers.to(self.runner.model_config.dtype).view(1, 2, layer.num_kv_heads, -1).unbind(1)
                layer.impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([slot]))

            self._places[gid] = entry_places(write, layer.kv_cache)
        return self._places[gid]

    def _blocks(self, name: str) -> torch.Tensor:
        """A layer's cache with the scheduler's blocks as first dimension, which a backend may have split."""
        return self._cache(name).unflatten(0, (self.runner.kv_cache_config.num_blocks, -1))

    def _cache(self, name: str) -> torch.Tensor:
        cache: torch.Tensor = self.runner.compilation_config.static_forward_context[name].kv_cache
        return cache
