# SPDX-License-Identifier: Apache-2.0
"""When DynaMo's heads rest, and which tokens they have not seen because of it.

Above the hard cut-off nobody drafts, nor does anybody while drafts do not pay: the heads' layers are then left out of
every step, prompts included, and with adaptive drafting out of every step that takes a prompt in. A head is one layer,
so the KV that a token lacks in it depends on that token's state alone. The state stands where the token's KV would
(entry_states.py), also for whoever meets the same blocks by a prefix-cache hit; a request that is to draft again has it
made into KV first, whenever that is and in any order.

Where the states do not fit into the heads' KV, what is missed is missed for good: the heads then rest in steps of
decoding alone, as a prompt may be the beginning of many others', and in pauses that last; who has missed something does
not draft.

Nothing is looked at until a step has rested for the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

from vllm_ppd.vllm_plugins.entry_states import MOST_TOKENS, EntryStates
from vllm_ppd.vllm_plugins.states import flat_ranges

logger = init_logger("vllm.vllm_ppd")

LOST = 1 << 40  # tokens: more than anyone can have


class Missed(NamedTuple):
    """Tokens that the heads have not seen, of those that they attend to, ordered by row and position."""

    rows: np.ndarray  # [tokens] batch row
    positions: np.ndarray  # [tokens]
    state: torch.Tensor  # [tokens, hidden]


class HeadsHistory:
    """Says of each step whether the heads rest, and of each batch row how much of its past they have not seen.

    Args:
        runner: vLLM's model runner; its KV cache may come later.
        first_layer: number of the heads' first layer.
        hidden_size: of the states that the heads read.
        most_requests: the hard cut-off (None: there is none).
    """

    def __init__(self, runner: Any, first_layer: int, hidden_size: int, most_requests: int | None) -> None:
        self.runner = runner
        self.first_layer, self.hidden_size = first_layer, hidden_size
        self.most_requests = most_requests
        self.resting = False  # whether the heads rest in the step that runs now
        self._missing: np.ndarray | None = None
        self.states: EntryStates | None = None
        self._unseen: list[np.ndarray] = []  # [slots] bool of each of the heads' KV cache groups
        self._groups: list[int] = []
        self._sizes = np.zeros((0, 1), dtype=np.int64)  # [groups, 1] tokens of a block
        self._window: int | None = None  # of the heads, which are layers of one kind
        # Of the step that runs now, and of the one before it until then.
        self._names: list[str] = []
        self._ends = np.zeros(0, dtype=np.int64)
        self._slots = np.zeros((0, 0), dtype=np.int64)  # [groups, tokens]
        self._steady = False  # whether it takes in one token of each request of the step before
        self._room = 0  # steps like it before a token begins a block
        self._counted = True  # whether what it takes in is; if not, it is such a step
        self._after: list[torch.Tensor] = []  # stems of the steps that are not counted yet, [rows, hidden] each
        self._stem: torch.Tensor | None = None

    def forget(self, req_ids: list[str]) -> None:
        """These are new, or their KV blocks are others than before."""
        if req_ids and self._names:
            gone = set(req_ids)
            self._names = ["" if name in gone else name for name in self._names]

    @property
    def missing(self) -> np.ndarray | None:
        """[batch rows] tokens up to the end of this step that the heads have not seen; None: they saw all."""
        self._count_after()
        return self._missing

    @missing.setter
    def missing(self, found: np.ndarray) -> None:
        self._missing = found

    def begin_step(self, paused: bool = False, lasting: bool = False, alike: bool = False) -> bool:
        """Take in the step that is about to run; returns whether the heads rest in it.

        Args:
            paused: whether drafts that could be made do not pay.
            lasting: whether they will not for long.
            alike: whether it is known to take in one token of each request of the step before.
        """
        rests_on = alike and paused and self.resting and self.states is not None and self._window is None
        self._counted = not (rests_on and self._steady and len(self._after) < self._room)
        if not self._counted:
            return True
        self._count_after()
        batch = self.runner.input_batch
        rows = batch.num_reqs
        crowded = self.most_requests is not None and rows > self.most_requests
        if self.missing is None:
            if not (crowded or paused):
                return False
            self._set_up()
        if self.resting and (crowded or paused) and self._goes_on():
            return True
        starts = batch.num_computed_tokens_cpu[:rows].astype(np.int64)
        lengths = np.diff(self.runner.query_start_loc.np[: rows + 1]).astype(np.int64)
        self._steady = self._names == batch.req_ids and bool((lengths == 1).all())
        self.resting = self.states is not None and (crowded or paused)
        if self.states is not None and not (self._steady and self.resting):
            self.states.settle()  # blocks may be others' from here on
        self._slots = self._slots_of(np.repeat(np.arange(rows), lengths), flat_ranges(starts, lengths))
        steady = self._steady and rows > 0
        room = int((self._sizes - 1 - self._slots % self._sizes).min()) if steady else 0
        self._room = min(room, MOST_TOKENS // max(rows, 1))
        # Before anyone is looked at: a block that one request fills may be another's prefix in the same step.
        self._mark(self._slots, self.resting)
        missing = self._missing_before(starts)
        if self.states is None:
            self.resting = (crowded or lasting or bool(missing.all())) and self._decoding(starts)
            self._mark(self._slots, self.resting)
        self._names, self._ends = list(batch.req_ids), starts + lengths
        if self.resting:
            missing = missing + lengths if self.states is not None else np.full(rows, LOST)
        self.missing = missing
        return self.resting

    def _goes_on(self) -> bool:
        """Take in a resting step whose tokens follow those of the one before, in the same blocks; whether it is one."""
        batch, rows = self.runner.input_batch, self._slots.shape[1]
        if not (self._steady and self._room) or self.states is None or self._names != batch.req_ids:
            return False
        if self.runner.query_start_loc.np[rows] != rows or (batch.num_computed_tokens_cpu[:rows] != self._ends).any():
            return False
        assert self.missing is not None
        self._slots = self._slots + 1  # those before may wait with their states
        self._ends += 1
        self.missing += 1
        self._room -= 1
        self._mark(self._slots, True)
        return True

    def _count_after(self) -> None:
        """Take in the steps that were not counted when they ran: for many at once that is done in no time."""
        if not self._after:
            return
        assert self._missing is not None and self.states is not None
        steps, stems, self._after = len(self._after), self._after, []
        slots = self._slots[:, None] + np.arange(1, steps + 1)[:, None]  # [groups, steps, rows]
        self._mark(slots, True)
        self.states.put(slots.reshape(len(slots), -1), torch.cat(stems))
        self._slots = self._slots + steps
        self._ends += steps
        self._missing += steps
        self._room -= steps

    @property
    def keeps(self) -> bool:
        """Whether the stem of the step that runs now is needed after it."""
        if self.states is None or self._missing is None:
            return False
        return self.resting or bool(self._missing.any())

    def keep(self, stem: torch.Tensor) -> None:
        """Keep the states of the step that ran, where the heads rested in it.

        Args:
            stem: [tokens, hidden] of the step, padding included; not overwritten before the next one.
        """
        self._stem = stem
        if not self._counted:
            self._after.append(stem[: self._slots.shape[1]].clone())
        elif self.resting and self.states is not None:
            # Tokens behind a window lose their blocks while their request goes on.
            later = self._steady and self._window is None
            self.states.put(self._slots, stem[: self._slots.shape[1]], later)

    def catch_up(self, rows: np.ndarray, places: np.ndarray) -> Missed | None:
        """What the heads have to compute before some rows may draft, who are whole from here on; None: nothing.

        Args:
            rows: [requests] batch rows.
            places: [requests] of the newest token of each among the tokens of the step that ran.
        """
        if self.missing is None or self.states is None or not self.missing[rows].any():
            return None
        behind = self.missing[rows] > 0
        rows, places = rows[behind], places[behind]
        newest = self._ends[rows] - (self.runner.query_start_loc.np[rows + 1] - places)
        whose, positions = self._unseen_of(rows, newest + 1)
        slots = self._slots_of(rows[whose], positions)
        state = self.states.get(slots)
        self._mark(slots, False)
        self.missing[rows] = 0
        self._ends = np.full_like(self._ends, -1)  # all others are counted again: blocks may have been theirs, too
        if not self.resting:
            # The heads have the newest token's KV, but what they say of it is of a past that they had not seen.
            assert self._stem is not None
            state = torch.cat([state, self._stem[torch.from_numpy(places).to(state.device)]])
            whose, positions = np.append(whose, np.arange(len(rows))), np.append(positions, newest)
            order = np.lexsort((positions, whose))
            whose, positions, state = whose[order], positions[order], state[torch.from_numpy(order).to(state.device)]
        return Missed(rows[whose], positions, state)

    def _missing_before(self, starts: np.ndarray) -> np.ndarray:
        """[batch rows] tokens up to this step's first that the heads have not seen; LOST if they never can."""
        names = self.runner.input_batch.req_ids
        if self._names == names:
            assert self.missing is not None
            missing, moved = self.missing.copy(), starts != self._ends
            again = moved & (missing > 0)  # drafts were rejected
        else:
            row_of = {name: row for row, name in enumerate(self._names)}
            before = np.array([row_of.get(name, -1) for name in names], dtype=np.int64)
            there = before >= 0
            missing = np.zeros(len(names), dtype=np.int64)
            again = starts > 0
            if there.any():
                assert self.missing is not None
                missing[there] = self.missing[before[there]]
                again[there] &= (missing[there] > 0) & (starts[there] != self._ends[before[there]])
        if self.states is None:
            again |= missing > 0  # a window leaves behind what was missed
        if again.any():
            rows = np.flatnonzero(again)
            missing[rows] = self._count(rows, starts[rows])
        return missing

    def _count(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[rows] tokens before `ends` that the heads attend to and have not seen."""
        whose, _ = self._unseen_of(rows, ends)
        found = np.bincount(whose, minlength=len(rows))
        if len(self._groups) > 1:
            for group in range(len(self._groups)):
                of_group, _ = self._unseen_in(group, rows, ends)
                # Blocks of one prefix can come from different requests; the state is in all groups, or in none.
                found[np.bincount(of_group, minlength=len(rows)) != found] = LOST
        return found if self.states is not None else np.where(found > 0, LOST, 0)

    def _unseen_of(self, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens before `ends` [rows] not seen in some group: (index into rows, position) [tokens], in this order."""
        found = [np.stack(self._unseen_in(group, rows, ends)) for group in range(len(self._groups))]
        whose, positions = found[0] if len(found) == 1 else np.unique(np.concatenate(found, axis=1), axis=1)
        return whose, positions

    def _unseen_in(self, group: int, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        blocks, size = self._table(group)
        # Blocks before the window may be another request's by now.
        first = np.zeros_like(ends) if self._window is None else np.maximum(ends - self._window, 0)
        counts = -(-ends // size) - first // size
        whose, columns = np.repeat(np.arange(len(rows)), counts), flat_ranges(first // size, counts)
        place, offset = np.nonzero(self._unseen[group].reshape(-1, size)[blocks[rows[whose], columns]])
        whose, positions = whose[place], columns[place] * size + offset
        within = (positions >= first[whose]) & (positions < ends[whose])
        return whose[within], positions[within]

    def _mark(self, slots: np.ndarray, unseen: bool) -> None:
        for of_group, own in zip(self._unseen, slots, strict=True):
            of_group[own] = unseen

    def _slots_of(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[groups, tokens] of tokens at some positions of batch rows."""
        found = []
        for group in range(len(self._groups)):
            blocks, size = self._table(group)
            found.append(blocks[rows, positions // size].astype(np.int64) * size + positions % size)
        return np.stack(found)

    def _table(self, group: int) -> tuple[np.ndarray, int]:
        """([batch rows, blocks] ids in the order of the positions, tokens of a block)."""
        table = self.runner.input_batch.block_table[self._groups[group]]
        return table.get_numpy_array(), table.block_size

    def _decoding(self, starts: np.ndarray) -> bool:
        """Whether every row takes in its last token, one that it emitted, and drafts at most.

        A single token of a prompt is a prompt, and so is what a request that was preempted computes again.
        """
        batch, rows = self.runner.input_batch, len(starts)
        return bool((starts >= np.maximum(batch.num_prompt_tokens[:rows], batch.num_tokens_no_spec[:rows] - 1)).all())

    def _set_up(self) -> None:
        """Find the KV cache groups that the heads' layers are in, and room for states."""
        config = self.runner.kv_cache_config
        layers: list[tuple[int, str]] = []
        windows = set()
        for gid, group in enumerate(config.kv_cache_groups):
            own = [name for name in group.layer_names if extract_layer_index(name) >= self.first_layer]
            if own:
                layers += [(len(self._groups), name) for name in own]
                self._groups.append(gid)
                self._unseen.append(np.zeros(config.num_blocks * group.kv_cache_spec.block_size, dtype=bool))
                windows.add(get_kv_cache_spec_sliding_window(group.kv_cache_spec))
        (self._window,) = windows
        self._sizes = np.array([[self._table(group)[1]] for group in range(len(self._groups))])
        self.missing = np.zeros(0, dtype=np.int64)
        try:
            self.states = EntryStates(self.runner, layers, self.hidden_size)
        except ValueError as error:
            logger.info("vllm-ppd: the heads run over prompts also while nobody drafts (%s)", error)
