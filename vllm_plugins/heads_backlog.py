# SPDX-License-Identifier: Apache-2.0
"""Tokens that DynaMo's heads have not seen yet: their states, kept while the heads rest, until somebody drafts again.

A head is one layer, so the KV that a token lacks in it depends on that token's state alone: it is completed later, in
any order, as early drafting completes the target's. The oldest states give way to new ones; whose are among them has
holes for good.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from vllm_ppd.model_patches.base import CutState, rows_of

MOST_WAITING = 64  # steps: what waits is memory that nobody has reserved


class HeadsBacklog:
    """A ring of (hidden, residual) by request and position.

    Args:
        capacity: tokens.
        hidden_size, dtype, device: those of the target's hidden states.
        has_residual: whether the family carries a residual stream beside the hidden states.
    """

    def __init__(
        self, capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device, has_residual: bool
    ) -> None:
        self.capacity = capacity
        self.hidden = torch.zeros(capacity, hidden_size, dtype=dtype, device=device)
        self.residual = torch.zeros_like(self.hidden) if has_residual else None
        self._position = np.zeros(capacity, dtype=np.int64)
        self._owner = np.full(capacity, -1)  # number of the request; -1: nobody's
        self._number: dict[str, int] = {}  # of each request all of whose missing tokens are here
        self._name: dict[int, str] = {}
        self._numbers = self._next = 0
        # Entries of steps that are not in the ring yet: to put them there takes a step as long as many.
        self._waiting: list[tuple[list[str], np.ndarray, CutState]] = []
        self._room = capacity  # tokens at least that fit before any is overwritten, beyond those that wait

    def holds(self, req_ids: list[str]) -> np.ndarray:
        """Requests that lack tokens, all of which are here: [requests] bool."""
        if not self._number:
            return np.zeros(len(req_ids), dtype=bool)
        return np.fromiter((name in self._number for name in req_ids), dtype=bool, count=len(req_ids))

    def forget(self, req_ids: Iterable[str]) -> None:
        """What these requests lack will not be completed."""
        held = self._number.keys() & set(req_ids)
        if not held:
            return
        if held >= {name for names, _, _ in self._waiting for name in names}:
            self._waiting.clear()
        else:
            self._settle()
        for name in held:
            number = self._number.pop(name)
            del self._name[number]
            self._owner[self._owner == number] = -1

    def add(self, req_ids: list[str], positions: np.ndarray, state: CutState) -> None:
        """Keep a token of each request.

        Args:
            req_ids: [requests]
            positions: [requests]
            state: of each token, ([requests, hidden], the same of the residual or None); it is not copied at once.
        """
        if len(req_ids) > self.capacity:
            self.forget(req_ids)
            return
        if len(req_ids) > self._room:
            self._settle()
            self._count_room()
        if len(req_ids) > self._room:
            req_ids, positions, state = self._overwrite(req_ids, positions, state)
            self._count_room()
        for name in req_ids:
            if name not in self._number:
                self._number[name], self._name[self._numbers] = self._numbers, name
                self._numbers += 1
        self._waiting.append((req_ids, positions, state))
        self._room -= len(req_ids)
        if len(self._waiting) == MOST_WAITING:
            self._settle()

    def _overwrite(
        self, req_ids: list[str], positions: np.ndarray, state: CutState
    ) -> tuple[list[str], np.ndarray, CutState]:
        """Give up the oldest tokens for these, and those of these whose older ones are among them."""
        owners = self._owner[(self._next + np.arange(len(req_ids))) % self.capacity]
        lost = [self._name[number] for number in np.unique(owners).tolist() if number >= 0]
        self.forget(lost)
        # Who has lost older ones has holes, whatever is kept of it from here on.
        left = np.flatnonzero([name not in lost for name in req_ids])
        index = torch.from_numpy(left).to(state[0].device, non_blocking=True)
        return [req_ids[row] for row in left], positions[left], rows_of(state, index)

    def _settle(self) -> None:
        """Put what waits into the ring."""
        if self._waiting:
            names, positions, states = zip(*self._waiting, strict=True)
            self._waiting = []
            numbers = [self._number[name] for some in names for name in some]
            places = (self._next + np.arange(len(numbers))) % self.capacity
            self._next = (self._next + len(numbers)) % self.capacity
            self._owner[places] = numbers
            self._position[places] = np.concatenate(positions)
            index = torch.from_numpy(places).to(self.hidden.device, non_blocking=True)
            self.hidden[index] = torch.cat([hidden for hidden, _ in states])
            if self.residual is not None:
                self.residual[index] = torch.cat([residual for _, residual in states if residual is not None])

    def _count_room(self) -> None:
        free = np.roll(self._owner, -self._next) < 0
        self._room = self.capacity if free.all() else int(np.argmin(free))

    def take(self, req_ids: list[str]) -> tuple[np.ndarray, np.ndarray, CutState]:
        """Everything that some requests lack, of each of them in order; it is then no longer here.

        Returns:
            (whose each token is, an index into req_ids [tokens]; its position [tokens]; copies of the states).
        """
        self._settle()
        numbers = np.array([self._number.get(name, -2) for name in req_ids], dtype=np.int64)
        places = np.flatnonzero(np.isin(self._owner, numbers))
        order = np.argsort(numbers)
        whose = order[np.searchsorted(numbers, self._owner[places], sorter=order)]
        sequence = np.lexsort((self._position[places], whose))
        places, whose = places[sequence], whose[sequence]
        index = torch.from_numpy(places).to(self.hidden.device, non_blocking=True)
        state = self.hidden[index], None if self.residual is None else self.residual[index]
        positions = self._position[places]
        self.forget(req_ids)
        return whose, positions, state
