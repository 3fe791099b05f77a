# SPDX-License-Identifier: Apache-2.0
"""Hidden states of tokens, each kept in the room of that token's own KV entries in some layers.

A layer that has not seen a token has no use for its entry there. What the layer needs to see the token later, the state
that it reads, takes no more room than the entries of a few layers: so it needs no memory of its own, is there for as
long as the token's block is, and found by whoever shares the block. Under tensor parallelism each rank has its share of
the entries, and keeps its share of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.distributed import get_tp_group

from vllm_ppd.kernels.paged_entries import entry_places

NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes: what is copied is not to be rounded
# What waits is memory that nobody has reserved.
MOST_STEPS, MOST_TOKENS = 64, 4096


class EntryStates:
    """States [tokens, hidden] by slot; a slot is block * block size + offset, as in vLLM's slot mappings.

    Args:
        runner: vLLM's model runner, whose KV cache is there.
        layers: (index of the KV cache group, name) of each layer whose entries are free to be used.
        hidden_size: of the states, which are of the model's dtype.

    Raises:
        ValueError: if the states do not fit, or the backend's entries cannot be told apart.
    """

    def __init__(self, runner: Any, layers: Sequence[tuple[int, str]], hidden_size: int) -> None:
        self.device, self.dtype = runner.device, runner.model_config.dtype
        of_name = runner.compilation_config.static_forward_context
        self._group = get_tp_group()
        share, rest = divmod(hidden_size, self._group.world_size)
        modules = [of_name[name] for _, name in layers]
        cache = modules[0].kv_cache
        if rest or cache.dim() != 4 or any(one.kv_cache.shape != cache.shape for one in modules):
            raise ValueError("KV caches of this shape hold no states")
        self.numbers = NUMBERS[cache.dtype.itemsize]
        self.size = cache.shape[2]  # tokens of a block
        self.entry = cache[0].numel() // self.size  # numbers of a layer's entry
        self.width = share * self.dtype.itemsize // cache.dtype.itemsize  # numbers of a state
        used = -(-self.width // self.entry)
        if used > len(layers):
            raise ValueError(f"a state of {self.width} numbers does not fit {len(layers)} entries of {self.entry}")
        self.layers = list(zip([gid for gid, _ in layers[:used]], modules[:used], strict=True))
        # A backend's own write is ten times as fast as one to places, and rounds what it quantizes.
        self.native = self.device.type == "cpu" and cache.dtype == self.dtype
        # Of a block's numbers; None: entries lie in the cache as its shape says.
        self.places: torch.Tensor | None = None
        if self.device.type == "cpu":
            self.places = backend_places(modules[0], self.dtype, ordered=self.native)
        self._waiting: list[tuple[np.ndarray, torch.Tensor]] = []

    def put(self, slots: np.ndarray, state: torch.Tensor, later: bool = False) -> None:
        """Keep states.

        Args:
            slots: [groups, tokens] in each KV cache group.
            state: [tokens, hidden]
            later: whether that has time until get or settle: whoever writes to these slots meanwhile calls settle.
        """
        if not later:
            self.settle()
            self._write(slots, state)
            return
        self._waiting.append((slots, state.clone()))
        if len(self._waiting) == MOST_STEPS or len(self._waiting) * len(state) >= MOST_TOKENS:
            self.settle()

    def settle(self) -> None:
        """Write what waits: to do it in every step takes longer than it does for many at once."""
        if self._waiting:
            slots, states = zip(*self._waiting, strict=True)
            self._waiting = []
            self._write(np.concatenate(slots, axis=1), torch.cat(states))

    def get(self, slots: np.ndarray) -> torch.Tensor:
        """States [tokens, hidden] that were put at slots [groups, tokens]."""
        self.settle()
        parts = []
        for gid, layer in self.layers:
            blocks, offsets = self._where(slots[gid])
            cache = layer.kv_cache.view(self.numbers)
            if self.places is None:
                parts.append(cache[blocks, :, offsets].flatten(1))
            else:
                parts.append(cache.view(len(cache), -1)[blocks[:, None], self.places[offsets]])
        share = torch.cat(parts, dim=1)[:, : self.width].contiguous().view(self.dtype)
        return share if self._group.world_size == 1 else self._group.all_gather(share, dim=1)

    def _write(self, slots: np.ndarray, state: torch.Tensor) -> None:
        if self._group.world_size > 1:
            state = state.chunk(self._group.world_size, dim=1)[self._group.rank_in_group]
        numbers = state.contiguous().view(self.numbers)
        parts = pad(numbers, (0, self.entry * len(self.layers) - self.width)).split(self.entry, dim=1)
        for (gid, layer), part in zip(self.layers, parts, strict=True):
            if self.native:
                _write_entries(layer, layer.kv_cache, torch.from_numpy(slots[gid]), part.view(self.dtype))
                continue
            blocks, offsets = self._where(slots[gid])
            cache = layer.kv_cache.view(self.numbers)
            if self.places is None:
                cache[blocks, :, offsets] = part.unflatten(1, (cache.shape[1], -1))
            else:
                cache.view(len(cache), -1)[blocks[:, None], self.places[offsets]] = part

    def _where(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(Block, offset) of each slot."""
        index = torch.from_numpy(slots).to(self.device, non_blocking=True)
        return index // self.size, index % self.size


def backend_places(layer: Any, dtype: torch.dtype, ordered: bool = False) -> torch.Tensor:
    """Where a CPU block keeps which token, as vLLM's attention layer itself writes it: see entry_places."""

    def write(cache: torch.Tensor, slot: int, numbers: torch.Tensor) -> None:
        _write_entries(layer, cache, torch.tensor([slot]), numbers.to(dtype)[None])

    return entry_places(write, layer.kv_cache, ordered)


def _write_entries(layer: Any, cache: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor) -> None:
    """Let vLLM's CPU attention write entries [tokens, numbers] as it would keys and values."""
    key, value = numbers.unflatten(1, (2, layer.num_kv_heads, -1)).unbind(1)
    layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
