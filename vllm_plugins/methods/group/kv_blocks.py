# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of vLLM's runner V2: each request's blocks, room for more, and
their copies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.paged_copy import copy_blocks, copy_entries, entry_places


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
