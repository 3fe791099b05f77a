# SPDX-License-Identifier: Apache-2.0
"""Which windows a step trains on: a function of the step alone, so that a run that continues sees the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_ppd.heads.training.tokens import Batch, TokenStore

SHIFT = 7919  # tokens that an epoch's windows lie after those of the epoch before


class Order:
    """Every epoch has another order, and another grid unless windows are to be read again from a cache."""

    def __init__(self, store: TokenStore, seed: int, batch_size: int, same_grid: bool) -> None:
        self.store, self.seed, self.batch_size, self.same_grid = store, seed, batch_size, same_grid
        self._permutation: tuple[int, torch.Tensor] | None = None

    def batches(self, step: int, parts: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The step's windows in that many batches, of which a process computes every world-th."""
        size = self.batch_size // parts
        windows = [self._window(step * self.batch_size + i) for i in range(self.batch_size)]
        for start in range(rank * size, parts * size, world * size):
            numbers, shifts = zip(*windows[start : start + size], strict=True)
            yield self.store.batch("train", numbers, shifts)

    def _window(self, index: int) -> tuple[int, int]:
        """(window number, shift in tokens)."""
        epoch, place = divmod(index, self.store.num_windows())
        if self._permutation is None or self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._permutation = (epoch, torch.randperm(self.store.num_windows(), generator=generator))
        shift = 0 if self.same_grid else epoch * SHIFT % self.store.length
        return int(self._permutation[1][place]), shift
